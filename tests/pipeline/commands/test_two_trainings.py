"""Commands on a run of two trainings: each of its checkpoints is that of one, and is used so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.execution.export_recipe import chosen, trained_in
from pipeline.execution.talk import found
from pipeline.view.run import History
from tests.support.pipe import Outcome, Pipe
from tests.support.tiny_recipe import EXPORT, write
from tests.support.two_trainings import CHATS, LORA, TEXT, begin, one, write_files


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pipe, Outcome]:
    """Return a finished run that exports after each training; the first is a LoRA's. Before each it
    has made a dry run."""
    folder = write_files(tmp_path_factory.mktemp("files"))
    between = {
        "merged": {"use": "consolidate.stream"},
        "early": {"use": "export.safetensors", "folder": str(folder / "early")},
        "trained": {"use": "model.trained"},
    }
    first, second = one(TEXT, "wrap.ddp", 3), one(CHATS, "wrap.fsdp", 5, "2")
    stages = begin("./model", LORA) | first | between | second | EXPORT
    pipe = Pipe(folder, folder)
    recipe = write(folder / "recipe.yaml", stages)
    recipe.write_text(json.dumps({**json.loads(recipe.read_text()), "dry_run": True}))
    outcome = pipe.run(recipe)
    assert outcome.code == 0, outcome.stderr
    return pipe, outcome


def slots(pipe: Pipe, *arguments: str) -> dict[str, Any]:
    """Run `pipe export`; return the slots of its recipe."""
    said = pipe("export", *arguments, "--procs", "1")
    assert said.code == 0, said.stderr
    (recipe,) = (pipe.run_dir / "exports").glob("*/export.yaml")
    stages = yaml.safe_load(recipe.read_text())["stages"]
    shutil.rmtree(recipe.parent)
    return dict(stages)


def test_its_last_lines_and_its_resume(made: tuple[Pipe, Outcome]) -> None:
    pipe, outcome = made
    run = pipe.run_dir
    ends = dict(line.strip().split("  ", 1) for line in outcome.stdout.splitlines()[-9:])
    shown = {name: value.strip().rpartition("/")[2] for name, value in ends.items()}
    assert (shown["train"], shown["train2"]) == ("step-00000003", "step-00000005")
    assert "nothing to do: every stage has finished" in pipe("resume", str(run)).stdout
    assert sorted(one.name for one in run.glob("checkpoints*")) == [
        "checkpoints", "checkpoints-train2", "checkpoints.at",
    ]  # fmt: skip


def test_a_dry_run_before_each_training_is_of_what_follows_from_it(
    made: tuple[Pipe, Outcome],
) -> None:
    lines = [
        line for line in made[1].stdout.splitlines() if line.startswith(("dry run: ", "train"))
    ]
    tried = [line.split(": ")[1] for line in lines if line.count(": ") == 2]
    before = lines.index("train: train.causal_lm"), lines.index("train2: train.causal_lm")
    chain = "checkpoint", "merged", "early", "trained", "checkpoint2", "consolidate", "export"
    assert tried == [*chain]
    ends = [number for number, line in enumerate(lines) if line.startswith("dry run: passed")]
    assert ends[0] < before[0] < ends[1] < before[1]
    assert not list(made[0].run_dir.glob("*.dry-run"))


def test_each_training_has_the_facts_of_its_own_engine(made: tuple[Pipe, Outcome]) -> None:
    run = made[0].run_dir
    files = [run / "engine.json", run / "engine-train2.json"]
    kinds = [json.loads(file.read_text())["engine"] for file in files]
    assert kinds == ["DistributedDataParallel", "fully_shard"]
    history = History(run)
    assert history.where == "DistributedDataParallel then fully_shard, 1 process, cpu"
    assert history.engines["train2"]["engine"] == "fully_shard"


def test_a_checkpoint_is_exported_as_of_its_training(made: tuple[Pipe, Outcome]) -> None:
    pipe, _ = made
    run, folder = pipe.run_dir, pipe.folder
    later = slots(pipe, str(run), "--step", "4", "--out", str(folder / "later"))
    assert list(later) == [
        "model", "adapter", "train", "trained", "train2", "consolidate", "export",
    ]  # fmt: skip
    assert later["train"]["checkpoint"] == str(run / "checkpoints" / "step-00000003")
    assert later["train2"]["checkpoint"] == str(run / "checkpoints-train2" / "step-00000004")
    first = run / "checkpoints" / "step-00000003"
    again = slots(pipe, str(first), "--out", str(folder / "again"))
    assert list(again) == ["model", "adapter", "train", "merged", "early"]
    files = [folder / name / "model.safetensors" for name in ("again", "early")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes() != (run / "export" / "model.safetensors").read_bytes()


def test_a_step_that_another_training_has(made: tuple[Pipe, Outcome]) -> None:
    pipe, _ = made
    said = pipe("export", str(pipe.run_dir), "--step", "3").stderr
    other = pipe.run_dir / "checkpoints" / "step-00000003"
    hint = f"or name a checkpoint of an earlier training: {other}"
    assert f"has no checkpoint of step 3; it has 4, 5 ({hint})" in said


def test_what_is_talked_to(made: tuple[Pipe, Outcome]) -> None:
    pipe, _ = made
    run, early = pipe.run_dir, pipe.folder / "early"
    assert (trained_in(run, early), trained_in(run, run / "export")) == ("", "train2")
    assert trained_in(run, run / "elsewhere") is None
    subject = found(str(run), None)
    # the early export is older, and no step of another training is newer than an export
    assert (subject.folder, subject.step, subject.newer) == (run / "export", 5, None)
    assert found(str(run), "4").checkpoint == str(run / "checkpoints-train2" / "step-00000004")
    first = str(run / "checkpoints" / "step-00000003")
    wrote = {}
    for source in (first, str(run)):
        said = pipe("generate", source, "w1", "--max-tokens", "8", "--beside", "--json")
        facts = json.loads(said.stdout)
        wrote[source] = {name: facts[name]["text"] for name in ("trained", "base")}
    # the second training started from what the first had made
    assert wrote[str(run)]["base"] == wrote[first]["trained"]
    assert chosen(first, step=None, model=None, to=Path("out")).run == run


def test_what_is_inspected_and_cleaned(made: tuple[Pipe, Outcome]) -> None:
    pipe, _ = made
    run = str(pipe.run_dir)
    inspected = CliRunner().invoke(main, ["inspect", run]).output.splitlines()
    assert inspected[0] == (
        f"of the newest training; an earlier one's: pipe inspect {run}/checkpoints"
    )
    assert [line.split()[0] for line in inspected[1:3]] == ["step-00000004", "step-00000005"]
    cleaned = CliRunner().invoke(main, ["clean", run]).output
    assert [line.split()[2] for line in cleaned.splitlines()[1:3]] == [
        "checkpoints/step-00000002", "checkpoints-train2/step-00000004",
    ]  # fmt: skip
