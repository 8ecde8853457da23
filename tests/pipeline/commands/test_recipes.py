"""`pipe cp`, from the checkout and from a wheel, and `pipe pin`. `pipe import` is tested in
tests/pipeline/importing."""

from __future__ import annotations

import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hatchling.builders.wheel import WheelBuilder

from pipeline.cli import main
from pipeline.recipe import load_recipe
from tests.support.hub import FIRST, SECOND, HubCache, hub_cache

ROOT = Path(__file__).parents[3]
NAMES = sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def cp(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cp", *arguments])


def test_shipped_recipes_are_listed() -> None:
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


def test_mistakes_of_cp() -> None:
    unknown = cp("smolm_ddp")
    assert unknown.exit_code == 2
    assert unknown.stderr == "error: no recipe is called smolm_ddp (did you mean `smollm_ddp`?)\n"
    Path("file").touch()
    blocked = cp("quickstart", "file")
    assert (blocked.exit_code, blocked.stderr) == (2, "error: File exists: file\n")


def test_from_a_wheel(tmp_path: Path) -> None:
    """The wheel has the recipes, templates and pages that commands need, but no weights."""
    target = tmp_path / "installed"
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(wheel) as files:
        files.extractall(target)
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
    for folder in ("pipeline/view/assets", "pipeline/launch/targets/templates"):
        assert {file.name for file in (target / folder).iterdir()} == {
            file.name for file in (ROOT / folder).iterdir()
        }


__all__ = ["hub_cache"]

BLOCK = """\
# My recipe.
name: mine   # of the run

stages:
  model:
    use: model.hf
    path: owner/name   # the base model

    attention: eager
  data:
    use: data.chat
    sources:
      - dataset: owner/rows
        weight: 2   # twice
      - {dataset: "owner/more", 'split': train, revision: v1}
      - files: ./here.jsonl
"""
PINNED = f"""\
# My recipe.
name: mine   # of the run

stages:
  model:
    use: model.hf
    path: owner/name   # the base model
    revision: '{FIRST}'  # main

    attention: eager
  data:
    use: data.chat
    sources:
      - dataset: owner/rows
        revision: '{SECOND}'  # main
        weight: 2   # twice
      - {{dataset: "owner/more", 'split': train, revision: '{FIRST}'}}
      - files: ./here.jsonl
"""


@pytest.fixture
def cache(hub_cache: HubCache) -> HubCache:
    """Return a cache of the hub with a model and two data sets, in a folder of recipes."""
    hub_cache.refer("model", "owner/name", main=FIRST, v2=SECOND)
    hub_cache.refer("dataset", "owner/rows", main=SECOND)
    hub_cache.refer("dataset", "owner/more", v1=FIRST)
    return hub_cache


def pin(recipe: str, text: str | None = None) -> Result:
    if text is not None:
        Path(recipe).write_text(text, newline="")
    return CliRunner().invoke(main, ["pin", recipe])


@pytest.mark.usefixtures("cache")
def test_comments_and_layout_stay() -> None:
    Path("mine.yaml").write_text(BLOCK)
    Path("mine.yaml").chmod(0o640)
    made = pin("mine.yaml")
    assert made.exit_code == 0, made.stderr
    assert Path("mine.yaml").read_text() == PINNED
    assert stat.S_IMODE(Path("mine.yaml").stat().st_mode) == 0o640
    assert made.stdout.splitlines() == [
        f"written: model.revision: {FIRST} in mine.yaml",
        f"written: data.sources.0.revision: {SECOND} in mine.yaml",
        f"written: data.sources.1.revision: {FIRST} in mine.yaml",
    ]
    assert made.stderr.startswith(f"model: owner/name is main at {FIRST} in this machine's cache")
    before = Path("mine.yaml").stat()
    again = pin("mine.yaml")
    assert (again.exit_code, again.output) == (0, "nothing to pin: all names have a commit\n")
    assert Path("mine.yaml").stat() == before


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("slot", "pinned"),
    [
        ("{use: model.hf, path: owner/name}",
         f"{{use: model.hf, path: owner/name, revision: '{FIRST}'}}"),
        ("{path: owner/name,\n    use: model.hf}",
         f"{{path: owner/name, revision: '{FIRST}',\n    use: model.hf}}"),
        ('{"use": "model.hf", "path": "owner/name"}',
         f'{{"use": "model.hf", "path": "owner/name", "revision": "{FIRST}"}}'),
        ("\n    revision: v2   # the second\n    use: model.hf\n    path: owner/name",
         f"\n    revision: '{SECOND}'   # the second\n    use: model.hf\n    path: owner/name"),
        ("\n    revision:\n    use: model.hf\n    path: owner/name",
         f"\n    revision: '{FIRST}'\n    use: model.hf\n    path: owner/name"),
        ("\n    use: model.hf\n    path: owner/name",
         f"\n    use: model.hf\n    path: owner/name\n    revision: '{FIRST}'  # main\n"),
        ("\r\n    path: owner/name\r\n    use: model.hf\r\n",
         f"\r\n    path: owner/name\r\n    revision: '{FIRST}'  # main\r\n    use: model.hf\r\n"),
        ("\n    use: model.hf\n    path: owner/name\n    tokenizer: owner/name # its\n",
         f"\n    use: model.hf\n    path: owner/name\n    revision: '{FIRST}'  # main\n"
         f"    tokenizer: owner/name # its\n    tokenizer_revision: '{FIRST}'  # main\n"),
    ],
)  # fmt: skip
def test_forms_of_a_pinned_slot(slot: str, pinned: str) -> None:
    head = "name: x\nstages:\n  model: "
    made = pin("x.yaml", head + slot)
    assert made.exit_code == 0, made.stderr
    assert Path("x.yaml").read_bytes().decode() == head + pinned


@pytest.mark.usefixtures("cache")
def test_a_name_is_pinned_where_it_is_written() -> None:
    Path("base.yaml").write_text("stages: {model: {use: model.hf, path: owner/name}}\n")
    own = "name: x\nextends: base.yaml\nstages:\n  model: {attention: eager}\n"
    made = pin("x.yaml", own)
    assert made.stdout == f"written: model.revision: {FIRST} in base.yaml\n"
    assert Path("x.yaml").read_text() == own
    assert f"path: owner/name, revision: '{FIRST}'" in Path("base.yaml").read_text()


@pytest.mark.usefixtures("cache")
def test_a_branch_is_replaced_where_it_is_written() -> None:
    base = "stages: {model: {use: model.hf, path: owner/name}}\n"
    Path("base.yaml").write_text(base)
    made = pin("x.yaml", "name: x\nextends: base.yaml\nstages:\n  model: {revision: v2}\n")
    assert made.stdout == f"written: model.revision: {SECOND} in x.yaml\n"
    assert Path("base.yaml").read_text() == base
    assert f"  model: {{revision: '{SECOND}'}}\n" in Path("x.yaml").read_text()


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("extends", ["base.yaml", "[base.yaml, middle.yaml]"])
def test_a_revision_of_another_name_stays(extends: str) -> None:
    base = "stages: {model: {use: model.hf, path: owner/name, revision: v2}}\n"
    Path("base.yaml").write_text(base)
    Path("middle.yaml").write_text("stages: {model: {path: owner/second}}\n")
    own = "" if "middle" in extends else "\nstages:\n  model:\n    path: owner/second"
    refused = pin("x.yaml", f"name: x\nextends: {extends}{own}\n")
    assert "owner/second: this machine's cache" in refused.stderr
    cached = Path("hub/models--owner--second/refs")
    cached.mkdir(parents=True)
    (cached / "v2").write_text(SECOND)
    made = pin("x.yaml")
    assert made.exit_code == 0, made.stderr
    file = "middle.yaml" if "middle" in extends else "x.yaml"
    assert made.stdout == f"written: model.revision: {SECOND} in {file}\n"
    assert Path("base.yaml").read_text() == base
    model = load_recipe("x.yaml").stages["model"].fields
    assert model == {"path": "owner/second", "revision": SECOND}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "text",
    [
        "name: &r main\nstages:\n  model: {use: model.hf, path: owner/name, revision: *r}\n",
        "name: x\nstages:\n  model:\n    use: model.hf\n    ? path\n    : owner/name\n",
        "name: x\nstages: {model: {use: model.hf, path: owner/name, revision}}\n",
    ],
)
def test_a_layout_that_cannot_be_kept_is_refused(text: str) -> None:
    refused = pin("x.yaml", text)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[-1] == (
        f"error: x.yaml: model.revision cannot be written here (write model.revision: '{FIRST}' "
        "yourself)"
    )
    assert Path("x.yaml").read_text() == text


@pytest.mark.usefixtures("cache")
def test_nothing_is_written_unless_all_can_be() -> None:
    base = (
        "stages:\n  data:\n    use: data.chat\n    sources:\n"
        "      - ? dataset\n        : owner/rows\n"
    )
    Path("base.yaml").write_text(base)
    own = "name: x\nextends: base.yaml\nstages:\n  model: {use: model.hf, path: owner/name}\n"
    refused = pin("x.yaml", own)
    assert "base.yaml: data.sources.0.revision cannot be written here" in refused.stderr
    assert Path("base.yaml").read_text() == base
    assert Path("x.yaml").read_text() == own


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nstages: {model: {use: model.hf, path: owner/other}}\n",
         "error: owner/other: this machine's cache "),
        ("name: x\nenv: [MODEL]\nstages: {model: {use: model.hf, path: '${oc.env:MODEL}'}}\n",
         "x.yaml:3:39: model.path: $MODEL is not written here: it is ${oc.env:MODEL} "
         "(set model.revision yourself)"),
        ("name: x\nstages: {model: {use: model.hf, pth: owner/other}}\n",
         "x.yaml:2:33: model.pth: "),
        ("name: [", "x.yaml:1:"),
    ],
)  # fmt: skip
def test_mistakes_of_pin_change_nothing(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL", "owner/name")
    refused = pin("x.yaml", text)
    assert refused.exit_code in (1, 2)
    assert refused.stderr.startswith(message)
    assert Path("x.yaml").read_text() == text


def test_a_recipe_without_names_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("name: x\nstages: {model: {use: model.hf, path: ./x}}\n")
    made = pin(str(tmp_path / "x.yaml"))
    assert made.output == "nothing to pin: no name of the hub needs a commit\n"
