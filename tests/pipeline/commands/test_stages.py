"""`pipe stages`, and `pipe new-stage`: the packages that it writes are built, installed, tested,
checked, and run on two processes as they are. `pipe schema` is tested in tests/pipeline/chain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from hatchling.builders.wheel import WheelBuilder
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pipeline import scaffold
from pipeline.cli import main
from pipeline.contracts.metrics import records
from pipeline.errors import UsageError
from pipeline.scaffold import KINDS, OTHER, REFUSED
from tests.stages.data.fakes import byte_tokenizer
from tests.support.pipe import Pipe
from tests.support.tier import spread

ROOT = Path(__file__).parents[3]


def test_stages_are_listed(pipe: Callable[..., Result]) -> None:
    lines = pipe("stages").stdout.splitlines()
    assert "model.fake       pipetrain 1.0      Declare a model." in lines
    (broken,) = [line for line in lines if line.startswith("broken.missing")]
    assert "faulty-plugin 1.0  cannot be used: stage `broken.missing`" in broken
    listed = {each["name"]: each for each in json.loads(pipe("stages", "--json").stdout)}
    assert listed["wrap.red"] == {
        "name": "wrap.red", "distribution": "pipetrain", "version": "1.0",
        "summary": "Wrap in red.", "error": "",
    }  # fmt: skip


EXPLAINED = """\
wrap.red (pipetrain 1.0)

Wrap in red.

needs: model (ModelSource), optimizer (OptimizerPlan)
returns: RedEngine

fields:
  stage: 1 | 2 | 3 (default 2)
      How much.
  offload: none | mapping | null (default none)
      Where to.
  offload.device: cpu | nvme (required)
      Which memory.
  offload.path: path | null (default null)
      The disk.
  offload.pin: bool (default true)
      Use page-locked memory.
  extra: mapping of anything | null (default null)
      Raw settings.
"""


def test_one_stage_is_explained(pipe: Callable[..., Result]) -> None:
    assert pipe("stages", "wrap.red").stdout == EXPLAINED
    fields = json.loads(pipe("stages", "model.fake", "--json").stdout)["fields"]
    assert fields[1] == {
        "name": "layers", "type": "int", "default": "2", "range": ">= 1, <= 100", "doc": "How many."
    }  # fmt: skip
    optional = json.loads(pipe("stages", "train.lm", "--json").stdout)["needs"]
    assert optional[-1] == {"parameter": "checkpoints", "type": "Checkpoints", "optional": True}


def test_an_unknown_stage(pipe: Callable[..., Result]) -> None:
    result = pipe("stages", "wrap.rad")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: there is no stage `wrap.rad` (did you mean `wrap.red`? "
        "wrap stages: wrap.blue, wrap.red; or install its package into this environment)\n"
    )


SLOTS: dict[str, dict[str, Any]] = {
    "track": {"file": "./lines.jsonl"},
    "model": {"tokenizer": "./tokenizer", "vocab_size": 260, "width": 32},
    "adapter": {},
    "data": {"file": "./rows.csv", "heldout": 4},
    "optimizer": {"lr": 0.5, "momentum": 0.9},
    "wrap": {},
    "checkpoint": {"also_at": [2], "keep": None},
    "callback": {"loss": 100.0, "steps": 3},
    "train": {"use": "train.causal_lm", "steps": 9, "global_batch_size": 4, "log_every": 1},
    "consolidate": {"share": 0.5},
    "export": {"dtype": "fp32"},
    "evaluate": {},
}
"""A chain that has a stage of every kind."""
OWN = [kind for kind in SLOTS if kind != "train"]
AFTER = "there is no example of the kind `report`: this stage runs after an export\n"
REASON = "the loss of 3 steps is "


def new_stage(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["new-stage", *arguments])


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the package of each kind."""
    folder, found = tmp_path_factory.mktemp("packages"), {}
    for kind in OWN:
        written = new_stage(f"{kind}.my_own", "--out", str(folder / kind))
        assert written.exit_code == 0, written.stderr
        found[kind] = folder / kind
    return found


def wheel_of(package: Path, folder: Path) -> str:
    """Build a package, as pip has it built, in this process."""
    return str(next(WheelBuilder(str(package)).build(directory=str(folder), versions=["standard"])))


@pytest.fixture(scope="module")
def installed(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of packages in which all are installed from their wheels."""
    folder, wheels = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("wheels")
    for package in packages.values():
        with zipfile.ZipFile(wheel_of(package, wheels)) as files:
            files.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def project(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Pipe:
    """Return `pipe` in a project, with all packages."""
    folder = tmp_path_factory.mktemp("project")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.save_pretrained(folder / "tokenizer")
    rows = "".join(f"{number} + 1 =,{number + 1}\n" for number in range(20))
    (folder / "rows.csv").write_text("prompt,answer\n" + rows)
    stages = {slot: {"use": f"{slot}.my_own", **fields} for slot, fields in SLOTS.items()}
    stages["precision"] = {"use": "precision.policy", "compute": "fp32"}
    order = ["track", "model", "adapter", "precision", *OWN[3:8], "train", *OWN[8:]]
    launch = {"procs": 2, "device": "cpu", "threads": 1, "restarts": {"limit": 0}}
    chain = {slot: stages[slot] for slot in order}
    recipe = {"name": "own", "launch": launch, "dry_run": True, "stages": chain}
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return Pipe(installed, folder)


@pytest.fixture(scope="module")
def run(project: Pipe) -> Path:
    """Return the folder of a finished run."""
    done = project.run(project.folder / "own.yaml")
    assert done.code == 0, done.stderr
    assert f"training ends early, at step 4 of 9: {REASON}" in done.stdout + done.stderr
    return project.run_dir


def test_every_kind_is_walked() -> None:
    found = {scaffold.new_stage(f"{kind}.my_own").template for kind in OWN}
    assert found == KINDS == {*OWN[:-1], OTHER}


def test_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, package, halves, note in (
        ("wrap.my_own", "pipetrain-wrap-my-own", ["", "_engine"], ""),
        ("report.x", "pipetrain-report-x", [""], AFTER),
    ):
        module = package.replace("-", "_")
        written = new_stage(name)
        assert written.exit_code == 0, written.stderr
        modules = [f"{module}{half}.py" for half in halves]
        files = ["pyproject.toml", "README.md", *modules, f"tests/test_{module}.py"]
        assert written.stdout.splitlines() == [f"{package}/{file}" for file in files]
        then = f"next: pip install -e '{package}[dev]' && pytest {package}\n"
        assert written.stderr == note + then


def _run(
    command: Sequence[str], folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=os.environ | variables
    )


def test_packages_are_in_style(packages: dict[str, Path]) -> None:
    for options in (["format", "--check"], ["check"]):
        command = [sys.executable, "-m", "ruff", *options, "--config", "pyproject.toml"]
        done = _run([*command, *map(str, packages.values())])
        assert done.returncode == 0, done.stdout


def test_a_further_module_is_in_the_wheel(packages: dict[str, Path], tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(packages["optimizer"], package)
    (package / "pipetrain_optimizer_my_own_extra.py").touch()
    (package / "setup_notes.py").touch()
    with zipfile.ZipFile(wheel_of(package, tmp_path)) as files:
        modules = [name for name in files.namelist() if "dist-info" not in name]
    module = "pipetrain_optimizer_my_own"
    assert sorted(modules) == [f"{module}{half}.py" for half in ("", "_extra", "_planner", "_rule")]


@pytest.mark.full
def test_a_strict_type_checker_finds_nothing(packages: dict[str, Path]) -> None:
    modules = [str(file) for folder in packages.values() for file in sorted(folder.glob("*.py"))]
    command = [sys.executable, "-m", "mypy", "--strict", *modules]
    path = os.pathsep.join(map(str, packages.values()))
    done = _run(command, packages["model"].parent, MYPYPATH=path)
    assert done.returncode == 0, done.stdout


def test_their_own_tests_pass(packages: dict[str, Path], installed: Path) -> None:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, packages.values())]
    own = _run(command, packages["model"].parent, PYTHONPATH=path)
    assert own.returncode == 0, own.stdout
    for kind in packages:
        assert f"{kind}/tests" not in own.stdout  # nothing failed or was skipped
    assert " passed" in own.stdout


def test_each_is_explained_and_checked(project: Pipe) -> None:
    listed = {one["name"]: one for one in json.loads(project("stages", "--json").stdout)}
    for kind in OWN:
        found = listed[f"{kind}.my_own"]
        assert (found["distribution"], found["version"]) == (f"pipetrain-{kind}-my-own", "0.1.0")
    shown = project("stages", "callback.my_own")
    assert shown.stdout.startswith("callback.my_own (pipetrain-callback-my-own 0.1.0)\n")
    checked = project("check", "own.yaml")
    assert (checked.code, checked.stderr) == (0, "")
    for kind in OWN:
        assert f"{kind}.my_own" in checked.stdout
    wrong = project("check", "own.yaml", "optimizer.momentum=2", "data.file=nowhere.csv")
    assert wrong.code == 2
    assert "optimizer.momentum: " in wrong.stderr
    assert "data.file: no such file: nowhere.csv" in wrong.stderr


def test_they_stand_in_a_shipped_recipe(project: Pipe) -> None:
    own = yaml.safe_load((project.folder / "own.yaml").read_text())["stages"]
    own["train"] = {}
    shipped = ROOT / "recipes" / "quickstart.yaml"
    recipe = {"extends": str(shipped), "name": "extended", "stages": own}
    (project.folder / "extended.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    checked = project("check", "extended.yaml")
    assert checked.code == 0, checked.stderr
    for kind in OWN:
        assert f"{kind}.my_own" in checked.stdout


def losses(run: Path) -> list[float]:
    return [one["loss"] for one in records(run / "metrics.jsonl") if "loss" in one]


def test_all_of_them_run_on_two_processes(run: Path) -> None:
    assert len(losses(run)) == 4
    (ended,) = [one for one in records(run / "metrics.jsonl") if "ended_early" in one]
    assert (ended["step"], ended["ended_early"][: len(REASON)]) == (4, REASON)
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    finished = {one["slot"]: one for one in journal if one["event"] == "slot finished"}
    assert list(finished)[-1] == "evaluate"
    assert finished["train"]["record"]["progress"]["stopped"] == ended["ended_early"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-00000002", "step-00000004",
    ]  # fmt: skip
    lines = [json.loads(line) for line in (run.parent / "lines.jsonl").read_text().splitlines()]
    assert [one["loss"] for one in lines if "loss" in one] == losses(run)
    listed = [line.split() for line in (run / "export.txt").read_text().splitlines()]
    assert {name: int(size) for name, size in listed} == {
        path.name: path.stat().st_size for path in (run / "export").iterdir()
    }


def test_the_export_is_half_of_what_was_trained(run: Path) -> None:
    from pipeline.checkpoint import Reading, open_state
    from stages.consolidate.stream import open_weights

    exported = AutoModelForCausalLM.from_pretrained(run / "export").state_dict()
    trained = open_weights(str(run / "checkpoints" / "step-00000004"))
    assert set(trained.names()) == {name for name in exported if name.endswith("norm.weight")}
    for name in trained.names():
        weight = trained.read(name)
        assert not torch.equal(weight, torch.ones_like(weight))
        torch.testing.assert_close(exported[name], (weight + 1) / 2)
    trained.close()
    state = open_state(str(run / "checkpoints" / "step-00000004"), Reading())
    assert state.state.kinds() == ["momentum_buffer"]
    state.close()


def test_the_run_can_be_talked_to(project: Pipe, run: Path) -> None:
    """Its export takes no TrainedRun, by which a checkpoint is opened."""
    answers = []
    for options in ([], ["--step", "4"]):
        done = project("generate", str(run), "1 + 1 =", "--max-tokens", "4", "--json", *options)
        assert done.code == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert [one["export"] is not None for one in answers] == [True, False]
    assert answers[0]["trained"]["text"] == answers[1]["trained"]["text"]


def test_its_export_is_verified(project: Pipe, run: Path, tmp_path: Path) -> None:
    done = project("verify", str(run))
    assert (done.code, done.stdout.splitlines()[-1]) == (0, "verified"), done.stderr
    later = project("export", str(run), "--out", str(tmp_path / "later"))
    assert later.code == 0, later.stderr
    (tmp_path / "later" / "config.json").write_text("{}")
    done = project("verify", str(tmp_path / "later"))
    assert (done.code, done.stderr) == (1, f"error: {tmp_path}/later/config.json has changed\n")


def test_a_resumed_run_does_not_train_on(project: Pipe, run: Path) -> None:
    """Another setting of the train slot makes it run again."""
    before = losses(run)
    done = project("resume", str(run), "train.log_every=2")
    assert done.code == 0, done.stderr
    assert f"training ends early, at step 4 of 9: {REASON}" in done.stdout + done.stderr
    assert losses(run) == before


OTHERS: list[list[str]] = [
    ["wrap={use: wrap.fsdp, pipeline_parallel: {size: 2}}"],
    ["wrap.use=wrap.ddp"],
    ["wrap.use=wrap.fsdp"],
    ["wrap={use: wrap.zero, stage: 3}"],
]


@pytest.mark.parametrize("overrides", spread(OTHERS, 1))
def test_they_do_the_same_under_every_strategy(
    overrides: list[str], project: Pipe, run: Path, tmp_path: Path
) -> None:
    done = project(
        "run", "own.yaml", *overrides, "--run-dir", str(tmp_path / "run"), "track.file=/dev/null"
    )
    assert done.code == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(run), rel=1e-5)
    mine, other = (
        AutoModelForCausalLM.from_pretrained(folder / "export").state_dict()
        for folder in (run, tmp_path / "run")
    )
    for name, tensor in mine.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_that_are_no_small_example_are_refused(kind: str, tmp_path: Path) -> None:
    refused = new_stage(f"{kind}.my_own", "--out", str(tmp_path / "new"))
    assert (refused.exit_code, refused.stdout) == (2, "")
    what = f"there is no example of the kind `{kind}`"
    assert refused.stderr == f"error: {what} (see docs/writing-a-stage.md)\n"
    page = (ROOT / "docs" / "writing-a-stage.md").read_text("utf-8")
    assert f"- `{kind}`: " in page
    assert not (tmp_path / "new").exists()


NO_NAME = "is not a stage name (a kind, a dot and a word, as in optimizer.sgd)"
TAKEN = "taken is there already (name another folder with --out)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sgd"], f"`sgd` {NO_NAME}"),
        (["Optimizer.Sgd"], f"`Optimizer.Sgd` {NO_NAME}"),
        (["optimizer.sgd_"], f"`optimizer.sgd_` {NO_NAME}"),
        (["optimizer.adamw"], "a stage called optimizer.adamw is installed already"),
        (["optimizer.sgd", "--out", "taken"], TAKEN),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    refused = new_stage(*arguments)
    assert (refused.exit_code, refused.stdout, refused.stderr) == (2, "", f"error: {message}\n")
    assert list(tmp_path.rglob("*")) == [tmp_path / "taken"]


@given(st.from_regex(r"[a-z_0-9]{1,8}\.[a-z_0-9]{1,8}", fullmatch=True))
def test_names_are_good_for_packages_and_classes(name: str) -> None:
    """Each name is refused, or makes a distribution's, a module's and a class's."""
    from packaging.requirements import Requirement

    try:
        new = scaffold.new_stage(name)
    except UsageError:
        return
    assert Requirement(new.package).name == new.package
    assert new.module.isidentifier()
    assert new.stage.isidentifier()
