"""A run as its launcher hands it over: the same plan, without secrets, files and checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.chain.plan import Plan, plan_file
from pipeline.chain.registry import Entry, Registry
from pipeline.contracts.stage import Context
from pipeline.errors import PluginError, RecipeError
from pipeline.execution.journal import Journal
from pipeline.execution.resume import digests, plan_resume
from pipeline.execution.run_spec import RunSpec

RECIPE = """\
name: handed
seed: 3
env: [DATA, SIZE]
launch: {procs: 2, device: cpu, timeouts: {step: 7.5}}
stages:
  model: {use: model.hf, config: {model_type: llama}}
  precision: {use: precision.policy, compute: fp32}
  data: {use: data.text, files: "${oc.env:DATA}", sequence_length: 8}
  optimizer: {use: optimizer.adamw, lr: 1.0e-5, warmup_steps: "${seed}"}
  wrap: {use: wrap.ddp}
  checkpoint: {use: checkpoint.sharded}
  train: {use: train.causal_lm, steps: 2, global_batch_size: 2, micro_batch_size: 1}
  consolidate: {use: consolidate.stream}
  export: {use: export.safetensors}
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    (tmp_path / "hunter2.txt").write_text("some text")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.setenv("DATA", str(tmp_path / "hunter2.txt"))
    return plan_file(tmp_path / "recipe.yaml", skip_checks=True)


def test_a_rank_has_the_plan_of_its_launcher(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RunSpec.of(plan.until("train"), tmp_path, ("model",)).dump()
    (tmp_path / "recipe.yaml").unlink()
    train = type(plan.slots[6].stage)
    monkeypatch.setattr(train, "check", lambda *_: pytest.fail("a rank checks nothing"))
    spec = RunSpec.load(text)
    settings, steps = spec.build()
    ours = digests(plan)
    for step, planned in zip(steps, plan.slots[:7], strict=True):
        assert {key: getattr(step, key) for key in vars(planned)} == vars(planned)
        assert (step.digest, step.training) == (ours[step.slot], "")
    unread = {step.slot: step.unread for step in steps if step.unread}
    taken = ("data", "optimizer", "wrap", "checkpoint")
    assert unread == {"wrap": ("precision",), "train": taken}
    assert settings.launch == plan.recipe.launch
    assert (settings.name, settings.seed, spec.device) == ("handed", 3, "cpu")
    assert spec.accept == ("model",)


def test_a_start_gets_what_the_journal_leaves_to_run(plan: Plan, tmp_path: Path) -> None:
    cut = plan.until("train")
    spec, journal = RunSpec.of(cut, tmp_path), Journal(tmp_path / "journal.jsonl")
    assert set(spec.starting(plan_resume(cut, journal)).todo) == {one.slot for one in cut.slots}
    record = {"checkpoint": str(tmp_path / "gone"), "progress": {}}
    journal.write("slot finished", slot="train", digest=digests(plan)["train"], record=record)
    left = RunSpec.load(spec.starting(plan_resume(cut, journal)).dump())
    assert set(left.todo) == {one.slot for one in cut.slots}
    said = f"slot `train` runs again: the trained checkpoint is gone: {tmp_path}/gone"
    assert left.warnings == (said,)


def made() -> type:
    """Return a stage's class, and that of its result, as no other process finds them by name."""

    class Result:
        pass

    @dataclass(frozen=True, kw_only=True)
    class Made:
        """A stage."""

        size: int = 1

        def run(self, ctx: Context) -> Result:
            return Result()

    Made.run.__annotations__ = {"ctx": Context, "return": Result}
    return Made


class Listed:
    """Another class than the one whose name it has."""


Copy = type("Listed", (made(),), {"__module__": __name__, "__doc__": "A stage."})
MADE = made()


@pytest.mark.parametrize("attribute", ["MADE", "Copy"])
def test_a_stage_that_is_not_found_by_its_class_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    entry = Entry(name="odd.made", value=f"{__name__}:{attribute}", distribution="odd", version="1")
    registry = Registry([entry])
    (tmp_path / "recipe.yaml").write_text("name: x\nstages: {odd: {use: odd.made, size: 3}}\n")
    plan = plan_file(tmp_path / "recipe.yaml", registry=registry)
    monkeypatch.setattr(Registry, "installed", lambda: registry)
    _, (step,) = RunSpec.load(RunSpec.of(plan, tmp_path).dump()).build()
    assert step.stage == plan.slots[0].stage
    assert (step.stage.size, step.gives) == (3, plan.slots[0].gives)
    monkeypatch.setattr(Registry, "installed", lambda: Registry([]))
    with pytest.raises(PluginError, match=r"stage `odd\.made` cannot be loaded.*same packages"):
        RunSpec.load(RunSpec.of(plan, tmp_path).dump()).build()


def test_the_values_of_environment_variables_stay_at_home(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RunSpec.of(plan, tmp_path).dump()
    assert "hunter2" not in text
    other = str(tmp_path / "elsewhere.txt")  # machines have their files in places of their own
    monkeypatch.setenv("DATA", other)
    _, steps = RunSpec.load(text).build()
    assert steps[2].stage.files == other
    monkeypatch.delenv("DATA")
    with pytest.raises(RecipeError, match=r"data\.files: environment variable `DATA` is not set"):
        RunSpec.load(text).build()
