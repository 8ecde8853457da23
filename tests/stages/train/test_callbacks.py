"""Step callbacks: a plugin's calls, and its state in checkpoints."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import testing
from pipeline.checkpoint.manifest import MANIFEST, Manifest
from pipeline.contracts.callbacks import Callbacks, StepCallback
from pipeline.contracts.metrics import records
from pipeline.contracts.signature import needs
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from stages.hf.trainer import HfTrainer
from stages.train.causal_lm import TrainCausalLm
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


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"q": deque([1])}, "is not JSON: q is a deque (return lists, finite numbers and texts)"),
        ({"a": [0, {"b": {1}}]}, "is not JSON: a[1].b is a set ("),
        ({"a": (1, "b", None, True), "c": math.nan}, "is not JSON: c is nan ("),
        ({"a": {("b", 1): 2}}, "is not JSON: a has the key ('b', 1) ("),
        ([1, 2], "is a list (`state` returns a mapping)"),
        (None, "is a NoneType (`state` returns a mapping)"),
    ],
)
def test_a_state_that_no_checkpoint_could_hold_is_refused(state: Any, problem: str) -> None:
    sink = Sink()
    sink.state = lambda: state  # type: ignore[method-assign]
    with pytest.raises(StageError, match=re.escape(f"the state of the callback {NAME} {problem}")):
        Callbacks(sink).state()


def test_what_is_no_callback_is_refused() -> None:
    class Duck:
        def on_step(self, *_: object) -> None: ...

    with pytest.raises(StageError, match=r"Duck is not a callback \(derive .*Duck from StepCall"):
        Callbacks(None, Duck())  # type: ignore[arg-type]


def train_with_sink(dist: DistContext, folder: str, case: Poisoned) -> dict[str, Any]:
    """Train, unless the state of a callback cannot be saved, which ends the run at once."""
    broken, sink = Sink(), Sink()
    broken.state = lambda: {"q": deque([1])}  # type: ignore[method-assign]
    with pytest.raises(StageError, match=r"Sink is not JSON: q is a deque \(return lists"):
        train(dist, f"{folder}/broken", case, broken)
    assert not broken.calls
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


class Bounded(Sink):
    """Ends the training where one rank sees that many steps in all, counted over resumes."""

    def __init__(self, limit: int, asks: bool) -> None:
        super().__init__()
        self.limit, self.asks = limit, asks

    def reason_to_end(self) -> str:
        return f"{self.count} steps are enough" if self.asks and self.count >= self.limit else ""


class Forgetful(Bounded):
    """Keeps no state."""

    def state(self) -> Mapping[str, Any]:
        return {}


def train_bounded(
    dist: DistContext, folder: str, case: Poisoned, limit: int, asks: list[int], kind: str
) -> dict[str, Any]:
    """Train with a sink, and a callback that ends the training on the ranks in `asks`."""
    bounded = {"Bounded": Bounded, "Forgetful": Forgetful}[kind](limit, dist.rank in asks)
    sink = Sink()
    told = train(dist, folder, case, Callbacks(sink, bounded))
    calls = [[call[:2] for call in one.calls] for one in (bounded, sink)]
    return {**told, "calls": calls}


ENDLESS = Poisoned(
    setting=Setting(wrap="ddp"), batches=range(9), steps=9, anomalies=Anomalies(), every=7
)


@pytest.mark.parametrize(
    ("kind", "asks", "wrap"),
    [("Bounded", [0, 1], "ddp"), ("Forgetful", [1], "ddp"), ("Bounded", [1], "fsdp pipeline")],
)
def test_a_callback_ends_the_training_of_all_ranks_with_a_reason(
    kind: str, asks: list[int], wrap: str, tmp_path: Path
) -> None:
    """The numbers of step 2 are known after the launch of step 3, which counts, also for the
    callback that had the reason. Resumed, the training has ended; with a higher limit it goes
    on."""
    case = replace(ENDLESS, setting=Setting(wrap=wrap))
    first = run_ranks(train_bounded, 2, str(tmp_path), case, 2, asks, kind)
    for told in first:
        assert (told["progress"]["step"], told["progress"]["stopped"]) == (3, "2 steps are enough")
        bounded, sink = told["calls"]
        assert bounded == sink == [["step", 1], ["step", 2], ["step", 3]]
        assert told["checkpoint"].endswith("step-00000003")
    assert [one["ended_early"] for one in first[0]["lines"] if "ended_early" in one] == [
        "2 steps are enough"
    ]
    if kind == "Forgetful":  # the reason itself is kept, and no rank has another
        name = f"{Forgetful.__module__}:Forgetful"
        assert saved(tmp_path, 3)["reasons to end"] == {name: "2 steps are enough"}
        asks = []
    again = run_ranks(train_bounded, 2, str(tmp_path), case, 2, asks, kind)[0]
    for part in ("lines", "state", "progress"):
        assert again[part] == first[0][part]
    if kind == "Bounded":
        on = run_ranks(train_bounded, 2, str(tmp_path), case, 4, asks, kind)[0]
        assert on["calls"][0] == [["restore", 3], ["step", 4], ["step", 5]]
        ended = on["progress"]["step"], on["progress"]["stopped"]
        assert ended == (5, "4 steps are enough")


def test_a_training_ends_before_its_first_step_and_goes_on_without_the_callback(
    tmp_path: Path,
) -> None:
    told = run_ranks(train_bounded, 2, str(tmp_path), ENDLESS, 0, [1], "Bounded")
    for one in told:
        assert (one["progress"]["step"], one["progress"]["stopped"]) == (0, "0 steps are enough")
        assert one["checkpoint"].endswith("step-00000000")
        assert one["calls"] == [[], []]
    whole = run_ranks(train, 2, str(tmp_path), ENDLESS)[0]
    assert (whole["progress"]["step"], whole["progress"]["stopped"]) == (9, "")
    assert saved(tmp_path, 9) == {}


def test_a_reason_is_a_text(tmp_path: Path) -> None:
    class Yes(Sink):
        def reason_to_end(self) -> Any:
            return True

    ctx = testing.context(tmp_path)
    with pytest.raises(StageError, match=r"Yes returned True as its reason to end, which is not a"):
        Callbacks(Yes()).agree_to_end(ctx.dist)


def test_reasons_are_asked_for_until_one_is_agreed_on(tmp_path: Path) -> None:
    both, ctx = Callbacks(Bounded(1, True), Bounded(2, True)), testing.context(tmp_path)
    assert (both.reason_to_end(), both.agree_to_end(ctx.dist)) == ("", "")
    for step in (1, 2):
        both.on_step(step, Progress(step=step, metrics={"loss": 2.0}), {"loss": 2.0})
        assert both.agree_to_end(ctx.dist) == "1 steps are enough"
        assert both.reason_to_end() == "1 steps are enough"


class AfterEvaluation(Sink):
    """Ends the training behind an evaluation."""

    def reason_to_end(self) -> str:
        return "evaluated" if self.calls[-1:] and self.calls[-1][0] == "evaluation" else ""


def train_evaluated(dist: DistContext, folder: str) -> list[dict[str, Any]]:
    """Train until an evaluation, and until an update that no evaluation follows."""
    case = replace(ENDLESS, steps=None)
    evaluated = replace(case, fields={"eval_every": 2})
    return [
        train(dist, f"{folder}/evaluated", evaluated, AfterEvaluation()),
        train(dist, f"{folder}/bounded", case, Bounded(2, True)),
    ]


def test_an_evaluation_ends_the_training_at_once_and_the_last_one_is_made(tmp_path: Path) -> None:
    first, second = run_ranks(train_evaluated, 1, str(tmp_path))[0]
    assert [one["step"] for one in first["lines"] if "eval_loss" in one] == [2]
    assert (first["progress"]["step"], first["progress"]["stopped"]) == (2, "evaluated")
    assert [one["step"] for one in second["lines"] if "eval_loss" in one] == [3]
    assert "eval_loss" in second["progress"]["metrics"]


def test_the_documented_callback_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "writing-a-stage.md").read_text("utf-8")
    code = page.partition("## Callbacks")[2].partition("```python")[2].partition("```")[0]
    found: dict[str, Any] = {
        "Any": Any, "Callbacks": Callbacks, "Context": Context, "Mapping": Mapping, "Path": Path,
        "Progress": Progress, "StepCallback": StepCallback, "dataclass": dataclass,
    }  # fmt: skip
    exec(compile("from __future__ import annotations\n" + code, "the guide", "exec"), found)
    ctx, sink = testing.context(tmp_path), Sink()
    callback = found["Losses"]().run(ctx, sink)
    for step, loss in ((1, 2.0), (2, 3.0)):
        callback.on_step(step, Progress(step=step, metrics={"loss": loss}), {"loss": loss})
    written = list(records(tmp_path / "metrics.jsonl"))
    assert [(one["step"], round(one["loss_ema"], 6)) for one in written] == [(1, 2.0), (2, 2.1)]
    assert len(sink.calls) == 2
    resumed = found["Losses"]().run(ctx, None)
    resumed.restore(callback.state())
    resumed.on_step(3, Progress(step=3, metrics={"loss": 2.1}), {"loss": 2.1})
    assert [*records(tmp_path / "metrics.jsonl")][-1]["loss_ema"] == pytest.approx(2.1)
