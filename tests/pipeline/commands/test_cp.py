"""`pipe cp`: recipes that come with the distribution, from the checkout and from a wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.recipe import load_recipe

ROOT = Path(__file__).parents[3]
NAMES = sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def cp(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cp", *arguments])


def test_the_list() -> None:
    listed = cp()
    assert listed.exit_code == 0
    rows = [line.split("  ", 1) for line in listed.stdout.splitlines()]
    assert [name for name, _ in rows] == NAMES
    assert all(summary.strip() for _, summary in rows)


@pytest.mark.parametrize("name", ["quickstart", "smollm_fsdp.yaml", "llama70b_zero3_offload"])
def test_a_copy_is_the_same_recipe(name: str) -> None:
    copied = cp(name, "mine/new")
    assert copied.exit_code == 0, copied.stderr
    stem = name.removesuffix(".yaml")
    target = Path("mine/new") / f"{stem}.yaml"
    assert f"next: pipe check {target}\n" in copied.stderr
    original = load_recipe(ROOT / "recipes" / f"{stem}.yaml")
    copy = load_recipe(target)
    assert [Path(line).name for line in copied.stdout.splitlines()] == [
        file.name for file in original.source_files
    ]
    here, there = str(Path("mine/new").resolve()), str(ROOT / "recipes")
    assert str(copy.public()).replace(here, there) == str(original.public())


def test_files_that_are_missing_are_named() -> None:
    model = "new/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
    said = cp("quickstart", "new").stderr.splitlines()
    texts = ["new/data/tickets.jsonl", "new/data/tickets_heldout.jsonl"]
    absent = ", ".join([model, *texts])
    said_first = (
        f"{absent} do not exist yet: put your files there, or name yours in the recipe, such as "
        "data.files"
    )
    assert said[0] == said_first
    for file in (model, *texts):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    assert len(cp("quickstart", "new").stderr.splitlines()) == 1
    spaced = cp("quickstart", "my folder").stderr
    assert spaced.endswith("next: pipe check 'my folder/quickstart.yaml'\n")


def test_nothing_is_overwritten() -> None:
    assert cp("smollm_fsdp").exit_code == 0
    assert cp("smollm_fsdp").exit_code == 0  # it is the same
    Path("smollm_ddp.yaml").write_text("mine")
    refused = cp("smollm_fsdp")
    assert refused.exit_code == 2
    assert refused.stderr == "error: smollm_ddp.yaml already exists and differs\n"
    assert Path("smollm_ddp.yaml").read_text() == "mine"


def test_mistakes() -> None:
    unknown = cp("smolm_ddp")
    assert unknown.exit_code == 2
    assert unknown.stderr == "error: no recipe is called smolm_ddp (did you mean `smollm_ddp`?)\n"
    Path("file").touch()
    blocked = cp("quickstart", "file")
    assert (blocked.exit_code, blocked.stderr) == (2, "error: File exists: file\n")


def test_from_a_wheel(tmp_path: Path) -> None:
    """The wheel has the recipes, templates and pages that commands need, but no weights."""
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "built"]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (wheel,) = Path("built").glob("*.whl")
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, *install, str(wheel)], check=True, capture_output=True)
    shipped = target / "pipeline" / "shipped_recipes"
    assert sorted(file.stem for file in shipped.glob("*.yaml")) == NAMES
    assert not list(shipped.rglob("*.gguf"))

    def pipe(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = (
            f"import sys; sys.path.insert(0, {str(target)!r}); import pipeline.cli;"
            f"assert pipeline.__file__.startswith({str(target)!r}), pipeline.__file__;"
            "pipeline.cli.main(sys.argv[1:])"
        )
        return subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True
        )

    copied = pipe("cp", "llama70b_zero3", "mine")
    assert copied.returncode == 0, copied.stderr
    assert copied.stdout == "mine/llama70b_zero3.yaml\nmine/llama70b_fsdp.yaml\n"
    for name in ("llama70b_zero3", "llama70b_fsdp"):
        text = Path(f"mine/{name}.yaml").read_text()
        assert text == (ROOT / "recipes" / f"{name}.yaml").read_text()
    made = pipe("new-stage", "optimizer.mine")
    assert made.returncode == 0, made.stderr
    assert Path("pipetrain-optimizer-mine/pyproject.toml").is_file()
    for folder in ("pipeline/view/report/assets", "pipeline/launch/targets/templates"):
        assert {file.name for file in (target / folder).iterdir()} == {
            file.name for file in (ROOT / folder).iterdir()
        }
