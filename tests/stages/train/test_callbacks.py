"""Step callbacks: a plugin's calls, and its state in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import testing
from pipeline.checkpoint.manifest import MANIFEST, Manifest
from pipeline.contracts.signature import needs
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Callbacks, Progress, StepCallback
from pipeline.distributed.process_group import DistContext
from stages.train.causal_lm import TrainCausalLm
from stages.train.hf_trainer import HfTrainer
from stages.train.settings import Anomalies
from tests.support.poison import NAN, Poisoned, train
from tests.support.processes import run_ranks
from tests.support.state import Setting


class Sink(StepCallback):
    """Records its calls, and counts steps over resumes."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.count = 0

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        assert progress.step == step
        assert progress.metrics["loss"] == record["loss"]
        self.count += 1
        self.calls.append(["step", step, record["loss"]])

    def on_evaluation(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        assert progress.metrics["eval_loss"] == record["eval_loss"]
        self.calls.append(["evaluation", step, record["eval_loss"]])

    def state(self) -> Mapping[str, Any]:
        return {"count": self.count}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        self.calls.append(["restore", self.count])


def test_both_train_stages_take_a_callback_if_a_slot_gives_one() -> None:
    for stage in (TrainCausalLm, HfTrainer):
        (need,) = [need for need in needs(stage) if need.type is StepCallback]
        assert need.optional


def test_several_callbacks_are_called_in_order_and_keep_states_of_their_own() -> None:
    order: list[str] = []

    class Other(StepCallback):
        def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
            order.append("other")

    class Loud(Sink):
        def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
            order.append("loud")
            super().on_step(step, progress, record)

    first, second = Sink(), Loud()
    both = Callbacks(Other(), None, Callbacks(first, Callbacks()), second, Sink())
    progress = Progress(step=1, metrics={"loss": 2.0})
    both.on_step(1, progress, {"loss": 2.0, "lr": 0.1})
    assert order == ["other", "loud"]
    state = json.loads(json.dumps(both.state()))
    assert list(state.values()) == [{"count": 1}] * 3
    assert [name.rpartition(".")[2] for name in state][1] == "Loud"
    assert [name.endswith("Sink#2") for name in state] == [False, False, True]
    again = Sink()
    Callbacks(again, Other()).restore(state)
    assert again.count == 1
    Callbacks(Other(), Loud()).restore({})


NAME = f"{Sink.__module__}:Sink"


def train_with_sink(dist: DistContext, folder: str, case: Poisoned) -> dict[str, Any]:
    sink = Sink()
    return {**train(dist, folder, case, sink), "calls": sink.calls}


def saved(folder: Path, step: int) -> Any:
    """Return the state of callbacks in a checkpoint."""
    file = folder / "checkpoints" / f"step-{step:08d}" / MANIFEST
    return Manifest.load(file.read_bytes(), "here").progress["callbacks"]


def test_a_callback_sees_every_step_on_every_rank_and_survives_a_resume(tmp_path: Path) -> None:
    case = Poisoned(
        setting=Setting(wrap="ddp"), batches=range(6), steps=3, anomalies=Anomalies(), every=2
    )
    first = run_ranks(train_with_sink, 2, str(tmp_path), case)
    on = run_ranks(train_with_sink, 2, str(tmp_path), replace(case, steps=5))
    losses = [["step", line["step"], line["loss"]] for line in on[0]["lines"] if "loss" in line]
    for one, other in zip(first, on, strict=True):
        assert one["calls"] == losses[:3]
        assert other["calls"] == [["restore", 3], *losses[3:]]
    assert [saved(tmp_path, step) for step in (2, 3, 4, 5)] == [
        {NAME: {"count": count}} for count in (2, 3, 4, 5)
    ]


def test_a_rollback_takes_the_callback_back_and_an_evaluation_is_reported(tmp_path: Path) -> None:
    """Checkpoints are at steps 0 and 2; the fourth of five batches is anomalous."""
    case = Poisoned(
        setting=Setting(wrap="ddp"), batches=range(5), poison={3: NAN}, every=2,
        anomalies=Anomalies(non_finite="rollback"),
    )  # fmt: skip
    told = run_ranks(train_with_sink, 1, str(tmp_path), case)[0]
    assert [call[:2] for call in told["calls"]] == [
        ["step", 1], ["step", 2], ["step", 3], ["restore", 2], ["step", 3], ["evaluation", 3],
    ]  # fmt: skip
    assert told["progress"]["callbacks"] == {NAME: {"count": 3}}


def test_without_a_callback_a_checkpoint_keeps_no_state(tmp_path: Path) -> None:
    case = Poisoned(setting=Setting(wrap="ddp"), batches=range(2), anomalies=Anomalies())
    run_ranks(train, 1, str(tmp_path), case)
    assert saved(tmp_path, 2) == {}


def test_the_documented_callback_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text("utf-8")
    code = page.partition("## Step callbacks")[2].partition("```python")[2].partition("```")[0]
    found: dict[str, Any] = {
        "Any": Any, "Callbacks": Callbacks, "Context": Context, "Mapping": Mapping, "Path": Path,
        "Progress": Progress, "StepCallback": StepCallback, "dataclass": dataclass,
    }  # fmt: skip
    exec(compile("from __future__ import annotations\n" + code, "training.md", "exec"), found)
    ctx, sink = testing.context(tmp_path), Sink()
    callback = found["Losses"]().run(ctx, sink)
    for step in (1, 2, 3):
        callback.on_step(step, Progress(step=step, metrics={"loss": 2.0}), {"loss": 2.0})
    assert (tmp_path / "losses.txt").read_text() == "1 2.0\n2 2.0\n3 2.0\n"
    assert len(sink.calls) == 3
    resumed = found["Losses"]().run(ctx, None)
    resumed.restore({name: {"lines": 2} for name in callback.state()})
    assert (tmp_path / "losses.txt").read_text() == "1 2.0\n2 2.0\n"
