"""`pipe run` and `pipe resume`: `--from`, `--until`, `--only` and `--dry-run` on a real run; and
packages of other people."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from tests.support.pipe import Pipe
from tests.support.tiny_project import tiny_project


@pytest.fixture(scope="module")
def part(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Pipe:
    """Return `pipe` with a run in `the run` that ended after its training."""
    pipe = Pipe(plugin, tmp_path_factory.mktemp("part"))
    done = pipe("run", str(pipe.recipe()), "--run-dir", str(pipe.run_dir), "--until", "train")
    assert done.code == 0, done.stderr
    assert re.search(r"^stopped after train, as asked, in 0:\d\d$", done.stdout, re.MULTILINE)
    return pipe


@pytest.fixture
def pipe(part: Pipe, plugin: Path, tmp_path: Path) -> Pipe:
    """Return `pipe` with a copy of that run, which the test may change."""
    own = Pipe(plugin, tmp_path)
    shutil.copytree(part.run_dir, own.run_dir)
    (own.run_dir / "calls.txt").write_text("")
    return own


def stages(pipe: Pipe) -> list[str]:
    return [call for call in pipe.calls() if not call.startswith("closed")]


def test_the_rest(pipe: Pipe) -> None:
    assert pipe("resume", str(pipe.run_dir)).code == 0
    assert stages(pipe) == ["declare", "export", "report"]
    assert pipe.events()[-1]["event"] == "run finished"


def test_one_slot(pipe: Pipe) -> None:
    assert pipe("resume", str(pipe.run_dir), "--only", "train").code == 0
    assert stages(pipe) == ["declare", "train"]
    assert [e["slot"] for e in pipe.events() if e["event"] == "slot set aside"] == ["train"]


def test_from_one_slot_to_another(pipe: Pipe) -> None:
    done = pipe("resume", str(pipe.run_dir), "--from", "train", "--until", "export")
    assert done.code == 0, done.stderr
    assert stages(pipe) == ["declare", "train", "export"]
    assert pipe.events()[-1]["problem"] == "after slot `export`, as asked"


@pytest.fixture
def here(pipe: Pipe, plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """Return `pipe`; the stages that misbehave are also installed for commands in this process,
    which start no other."""
    monkeypatch.syspath_prepend(plugin)
    return pipe


def call(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_a_dry_run(here: Pipe) -> None:
    before = {path: path.stat().st_mtime_ns for path in here.run_dir.rglob("*")}
    done = call("resume", str(here.run_dir), "--dry-run", "--until", "export")
    assert (done.exit_code, done.stderr) == (0, "")
    head, *rows, last = done.stdout.splitlines()
    assert head == "faulty: 1 process, cpu"
    assert [re.split("  +", row) for row in rows] == [
        ["declare", "fault.declare", "has finished"],  # only the report reads it
        ["train", "fault.train", "has finished"],
        ["export", "fault.export", "would run"],
        ["report", "fault.report", "is left out"],
    ]
    assert last == "nothing was started"
    assert {path: path.stat().st_mtime_ns for path in here.run_dir.rglob("*")} == before


def test_a_dry_run_of_a_new_run_makes_no_folder(here: Pipe) -> None:
    recipe, folders = here.recipe(), set(here.folder.iterdir())
    done = call("run", str(recipe), "-n", "--only", "declare")
    assert done.exit_code == 0
    assert "declare  fault.declare  would run\ntrain    fault.train    is left out" in done.stdout
    assert set(here.folder.iterdir()) == folders


def test_a_dry_run_is_refused_what_the_run_would_be(here: Pipe) -> None:
    recipe = str(here.recipe())
    refused = call("run", recipe, "-n", "--fresh", "--run-dir", str(here.run_dir))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "already holds a run" in refused.stderr
    (here.run_dir / "recipe.yaml").unlink()
    left = call("run", recipe, "-n", "--run-dir", str(here.run_dir))
    assert left.exit_code == 2
    assert "of another run, and no recipe.yaml" in left.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--until", "trian"], "error: the recipe has no slot `trian` (did you mean `train`?)"),
        (["--from", "export", "--until", "train"],
         "error: --from export comes after --until train"),
        (["--only", "train", "--until", "train"], "error: --only excludes --from and --until"),
    ],
)  # fmt: skip
def test_mistakes(options: list[str], message: str, here: Pipe) -> None:
    before = here.events()
    for command in (["run", str(here.recipe()), "--run-dir", str(here.run_dir)],
                    ["resume", str(here.run_dir)]):  # fmt: skip
        refused = call(*command, *options)
        assert (refused.exit_code, refused.stderr) == (2, f"{message}\n")
    assert (stages(here), here.events()) == ([], before)


ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with packages of these names, which fail when they are imported."""
    for name in ("pipeline", "stages"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(f"raise SystemExit('the user\\'s {name}')\n")
        (package / "cli.py").touch()
    return tmp_path


def called(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([".", str(folder), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pipetrain", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_recipe_is_checked_and_trained(folder: Path) -> None:
    tiny_project(folder)
    checked = called(folder, "check", "tiny.yaml")
    assert checked.returncode == 0, checked.stderr
    less = ["--until", "train", "train.steps=2", "launch.procs=1", "wrap.use=wrap.fsdp"]
    trained = called(folder, "run", "tiny.yaml", "--run-dir", "run", *less)
    assert trained.returncode == 0, trained.stderr
    assert (folder / "run/checkpoints/step-00000002/manifest.json").is_file()
