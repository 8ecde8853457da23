"""Runs from Python: recipes as files and as mappings, events, failures, stops, threads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pipeline import (
    RecipeError,
    RunFailed,
    RunOutcome,
    RunStopped,
    UsageError,
    check,
    plan,
    resume,
    run,
)
from pipeline.chain.plan import plan_file
from pipeline.cli import main
from pipeline.execution.journal import Journal
from pipeline.execution.resume import digests
from tests.pipeline.conftest import TinyRun
from tests.support.pipe import ForkedPopen
from tests.support.tier import FULL

SLOTS = ("declare", "train", "export", "report")
Event = Mapping[str, Any]


@pytest.fixture(autouse=True)
def _project(plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh folder, where the stages that misbehave are installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(plugin)
    monkeypatch.setenv("PYTHONPATH", str(plugin))
    if not FULL:
        patched = SimpleNamespace(
            Popen=ForkedPopen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
        )
        monkeypatch.setattr("pipeline.api.subprocess", patched)


def recipe(**train: Any) -> dict[str, Any]:
    stages = {slot: {"use": f"fault.{slot}"} for slot in SLOTS}
    launch = {"procs": 1, "device": "cpu", "restarts": {"limit": 0}}
    stages["train"] |= train
    return {"name": "faulty", "launch": launch, "stages": stages}


def test_a_mapping_and_its_events(tmp_path: Path) -> None:
    events: list[Event] = []
    outcome = run(recipe(), ["export.suffix=now"], on_event=events.append)
    assert outcome.folder.parent == tmp_path / "runs"
    assert outcome.folder.name.startswith("faulty-")
    assert (outcome.folder / "export.txt").read_text() == "trained exportednow"
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["run", "run started"]
    assert kinds[-1] == "run finished"
    assert [e["slot"] for e in events if e["event"] == "slot finished"] == list(SLOTS)
    assert {event["schema_version"] for event in events} == {1}
    assert outcome.history().state == "finished"


def test_a_file_up_to_a_slot_and_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(), sort_keys=False))
    outcome = run(file, run_dir="mine", until="train")
    assert outcome.folder == tmp_path / "mine"
    history = outcome.history()
    assert history.state == "stopped"
    assert history.slots["export"].state == "waiting"
    events: list[Event] = []
    again = resume(outcome.folder, ["export.suffix=later"], on_event=events.append)
    assert (again.folder / "export.txt").read_text() == "trained exportedlater"
    finished = [event["slot"] for event in events if event["event"] == "slot finished"]
    assert finished == ["declare", "export", "report"]


def test_paths_of_a_mapping_are_relative_to_the_working_directory(tmp_path: Path) -> None:
    made = recipe()
    made["stages"]["declare"]["text"] = "./a file"
    outcome = run(made, until="declare")
    assert outcome.history().recipe.stages["declare"].fields["text"] == str(tmp_path / "a file")


def test_mistakes_start_nothing(tmp_path: Path, tiny_run: TinyRun) -> None:
    with pytest.raises(RecipeError, match=r"declare\.txt: unknown field") as caught:
        run(recipe(), ["declare.txt=1"])
    (problem,) = caught.value.problems
    assert problem.hint == "did you mean `text`?"
    with pytest.raises(UsageError, match=r"not the folder of a run"):
        resume("nothing")
    with pytest.raises(UsageError, match="no GPU of this name is known"):
        plan(tiny_run.recipe, gpus=1, gpu="Q5")
    with pytest.raises(UsageError, match=r"no slot `trian`"):
        run(recipe(), until="trian")
    assert list(tmp_path.iterdir()) == []


def test_every_function_raises_the_same_error_for_the_same_mistake(tiny_run: TinyRun) -> None:
    for function, given in (
        (check, tiny_run.recipe),
        (plan, tiny_run.recipe),
        (run, tiny_run.recipe),
        (resume, tiny_run.folder),
    ):
        with pytest.raises(RecipeError) as caught:
            function(given, ["train.step=3"])
        (problem,) = caught.value.problems
        assert (problem.key, problem.message) == ("train.step", "unknown field")


def test_a_check_returns_warnings(tiny_run: TinyRun) -> None:
    assert check(tiny_run.recipe) == ()
    (warning,) = check(tiny_run.recipe, ["export=null"])
    assert warning.key == "consolidate.use"
    assert warning.message.startswith("no slot reads its result")


def test_mistakes_resume_nothing() -> None:
    run(recipe(), run_dir="mine", until="train")
    before = Path("mine/journal.jsonl").read_text()
    with pytest.raises(RecipeError, match=r"export\.sufix: unknown field"):
        resume("mine", ["export.sufix=later"])
    with pytest.raises(UsageError, match="nothing"):
        resume("mine", accept=["nothing"])
    assert Path("mine/journal.jsonl").read_text() == before


def test_a_failed_run_says_why_and_goes_on() -> None:
    events: list[Event] = []
    with pytest.raises(RunFailed) as caught:
        run(recipe(fault="raise"), run_dir="mine", on_event=events.append)
    said = str(caught.value).splitlines()
    assert any("ValueError: boom" in line for line in said)
    assert "pipe resume " in said[-1]
    assert caught.value.folder == Path("mine").resolve()
    assert events[-1]["event"] == "run failed"
    assert "boom" in events[-1]["problem"]
    assert resume("mine", ["train.fault=none"]).history().state == "finished"


def test_a_run_that_somebody_stops() -> None:
    def stop(event: Event) -> None:
        if event.get("slot") == "train":
            owner = Path("mine/lock").read_text().split()[1]
            os.kill(int(owner), signal.SIGTERM)

    with pytest.raises(RunStopped, match=r"stopped by SIGTERM[\s\S]*pipe resume") as caught:
        run(recipe(fault="hang"), run_dir="mine", on_event=stop)
    assert caught.value.folder == Path("mine").resolve()


def test_an_error_of_the_listener_stops_the_run() -> None:
    def interrupt(event: Event) -> None:
        if event.get("slot") == "train":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe(fault="hang"), run_dir="mine", on_event=interrupt)
    assert RunOutcome(Path("mine")).history().state == "stopped"


def test_several_in_threads() -> None:
    found: dict[str, str] = {}

    def one(suffix: str) -> None:
        outcome = run(recipe(), [f"export.suffix={suffix}"])
        found[suffix] = (outcome.folder / "export.txt").read_text()

    threads = [threading.Thread(target=one, args=(suffix,)) for suffix in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {suffix: f"trained exported{suffix}" for suffix in "abc"}


def test_what_came_of_a_training(tiny_run: TinyRun) -> None:
    outcome = RunOutcome(tiny_run.folder)
    history = outcome.history()
    assert history.metrics == tiny_run.records
    assert [step["step"] for step in history.steps] == list(range(1, 9))
    assert history.best == {
        "step": 8, "eval_loss": min(one["eval_loss"] for one in history.evaluations)
    }  # fmt: skip
    assert outcome.export == tiny_run.folder.resolve() / "export"
    assert outcome.results() == {
        "train": tiny_run.folder.resolve() / "checkpoints/step-00000008",
        "export": tiny_run.folder.resolve() / "export",
    }


def test_an_export_in_a_folder_of_its_own(tiny_run: TinyRun, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    content = yaml.safe_load((folder / "recipe.yaml").read_text())
    content["stages"]["export"]["folder"] = str(tmp_path / "model")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    assert RunOutcome(str(folder)).export is None
    (tmp_path / "model").mkdir()
    Journal(folder / "journal.jsonl").write(
        "slot finished",
        slot="export",
        digest=digests(plan_file(folder / "recipe.yaml"))["export"],
        record={"folder": str(tmp_path / "model"), "files": [], "total_bytes": 0},
    )
    assert RunOutcome(folder).export == tmp_path / "model"


def test_a_plan_is_that_of_the_command(tiny_run: TinyRun) -> None:
    overrides = ["launch.device=cuda", "train.micro_batch_size=2"]
    needs = plan(tiny_run.recipe, overrides, gpus=2, gpu="H100")
    command = ["plan", str(tiny_run.recipe), *overrides, "--gpus", "2", "--gpu", "H100", "--json"]
    shown = CliRunner().invoke(main, command)
    record = json.loads(shown.stdout)
    del record["remedies"]
    assert json.loads(json.dumps(needs.record())) == record
    assert needs.fits
    assert 0 < needs.needed < 4 << 30
