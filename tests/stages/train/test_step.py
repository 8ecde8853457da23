"""One optimizer step: when its numbers are asked for, read and reported, and what they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline import DistContext, Progress, StepCallback, StepReport
from pipeline.contracts.metrics import records
from pipeline.contracts.objective import LossParts, ScoreRequest
from pipeline.errors import StageError
from stages.batches.feed import BatchStats
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.objectives.cross_entropy import CrossEntropy
from stages.optimizer.adamw import AdamW
from stages.train.anomalies import AnomalyMonitor
from stages.train.causal_lm import TrainCausalLm
from stages.train.settings import Anomalies
from stages.train.speed import Cost
from stages.train.step import StepMeter, StepResult, TrainStep
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.state import Setting, make_engine, source

NAN = float("nan")


class Recording:
    """An engine that notes what it is asked for; the sum of the losses is 6."""

    data_axis = SimpleNamespace(count=1)
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[str] = []

    def accumulate(self, batches: Any, objective: Any, *, counts: Any) -> LossParts:
        self.calls.append("accumulate")
        six = torch.tensor(6.0)
        return LossParts(
            terms=dict.fromkeys(objective.units, six), sums=dict.fromkeys(objective.metrics, six)
        )

    def total(self, values: torch.Tensor) -> torch.Tensor:
        self.calls.append("total")
        return values

    def step(self, **options: Any) -> StepReport:
        self.calls.append("step")
        return StepReport(grad_norm=1.0, applied=True)


class Pairs:
    """An objective per group of rows, with metrics by rows."""

    request = ScoreRequest(tokens=True)
    units = ("groups",)

    def __init__(self, *metrics: str) -> None:
        self.metrics: Any = dict.fromkeys(metrics, "rows")


def step_of(
    engine: Any, objective: Any, progress: Progress, **counts: int
) -> tuple[TrainStep, StepMeter]:
    feed: Any = SimpleNamespace(
        unit_counts=lambda position, units=(): counts, samples_in_step=lambda position: 2,
        microbatches=lambda position: [], total_steps=lambda progress: 9,
    )  # fmt: skip
    plan: Any = SimpleNamespace(
        lr_scales=lambda step, total: [0.5], rates=lambda scales: {"lr": 0.1 * scales[0]},
    )  # fmt: skip
    meter = StepMeter(engine, DistContext(device=engine.device), progress)
    step = TrainStep(
        engine=engine,
        objective=objective,
        feed=feed,
        plan=plan,
        monitor=AnomalyMonitor(Anomalies(), engine.total),
        meter=meter,
    )
    return step, meter


def test_the_sums_are_asked_for_before_the_update_and_read_behind_it() -> None:
    """So what the host waits for are the gradients, and not the update."""
    engine, progress = Recording(), Progress()
    step, meter = step_of(engine, CrossEntropy(), progress, targets=3)
    result = step(progress)
    assert engine.calls == ["accumulate", "total", "step"]
    record = meter.record(meter.launched_step(result, Progress(), progress))
    assert engine.calls == ["accumulate", "total", "step"]
    assert (record["loss"], record["lr"], progress.step, progress.samples) == (2.0, 0.05, 1, 2)


@pytest.mark.parametrize("name", ["loss", "tokens", "eval_loss", "lr"])
def test_a_metric_does_not_take_the_name_of_another_number(name: str) -> None:
    engine, progress = Recording(), Progress()
    for metric in ("margin", name):
        step, meter = step_of(engine, Pairs(metric), progress, targets=3, rows=4, groups=2)
        taken = meter.launched_step(step(progress), Progress(), progress)
        if metric == "margin":
            record = meter.record(taken)
            assert (record["loss"], record["margin"]) == (3.0, 1.5)
    with pytest.raises(StageError, match=f"a metric {name!r}, a name that each step's record has"):
        meter.record(taken)


def test_a_step_needs_what_its_loss_is_divided_by_and_no_more() -> None:
    """An objective without labels has no target tokens."""
    engine = Recording()
    step, _ = step_of(engine, Pairs(), Progress(), targets=0, rows=4, groups=2)
    assert float(step(Progress()).report.grad_norm) == 1.0
    step, _ = step_of(engine, Pairs(), Progress(), targets=3, rows=0, groups=0)
    with pytest.raises(StageError, match="step 1: no group of rows in the whole batch"):
        step(Progress())


def test_tokens_of_a_group_count_once_and_its_devices_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices run two shares of samples: 14 tokens, not 28."""
    others = 3  # whose sums are like this rank's, but for the loss
    engine: Any = SimpleNamespace(
        data_axis=SimpleNamespace(count=2), device=torch.device("cpu"),
        total=lambda sums: sums + others * torch.cat([torch.zeros(1), sums[1:]]),
    )  # fmt: skip
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
    dist = DistContext(rank=0, world_size=4, device=torch.device("cpu"))
    meter = StepMeter(engine, dist, Progress(), Cost(multiplied=1.0, attention=0.0, peak=1.0))
    report = StepReport(grad_norm=1.0, applied=True)
    sums = meter.start_reduction(torch.tensor(2.0), BatchStats(tokens=7))
    done = StepResult(report=report, rates={"lr": 0.1}, stats=BatchStats(tokens=7), sums=sums)
    record = meter.record(meter.launched_step(done, Progress(), Progress(step=1)))
    tokens = record["tokens_per_second"] * record["step_seconds"]
    assert tokens == pytest.approx(14)
    assert record["mfu"] * record["step_seconds"] == pytest.approx(14 / 4)
    assert record["tokens_per_second_per_rank"] == pytest.approx(record["tokens_per_second"] / 4)


class Norm:
    """A gradient norm on its way, which notes when it is first waited for."""

    def __init__(self, said: list[str], step: int, value: float) -> None:
        self._said, self._step, self._value = said, step, value

    def __float__(self) -> float:
        if self._said[-1] != f"read {self._step}":
            self._said.append(f"read {self._step}")
        return self._value


class Told(StepCallback):
    """Notes what it is told, and of which progress."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        assert (progress.step, progress.samples) == (step, 4 * step) == (step, record["samples"])
        assert progress.metrics == {"loss": record["loss"]}
        self._said.append(f"told {step}")

    def on_evaluation(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        self._said.append(f"evaluated {step}")


def train(
    dist: DistContext, folder: str, every: int | None, fields: dict[str, Any],
    norms: dict[int, float], breaks_at: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Train five steps; return what was done in which order, the steps in metrics.jsonl, those of
    checkpoints with the loss that each has, and the error."""
    ctx = context(dist, folder)
    plan = AdamW(lr=1e-2).run(ctx)
    engine = make_engine(ctx, Setting(wrap="ddp"), plan)
    checkpoints = ShardedCheckpoint(every=every, keep=None).run(ctx, engine)
    said: list[str] = []
    take, save, taken = engine.step, checkpoints.save, iter(range(1, 99))

    def step(**options: Any) -> StepReport:
        number = next(taken)
        if number == breaks_at:
            raise ValueError("broken")
        said.append(f"launch {number}")
        report = take(**options)
        value = norms.get(number, float(report.grad_norm))
        return replace(report, grad_norm=Norm(said, number, value))

    def saved(progress: Progress) -> None:
        said.append(f"save {progress.step} with loss {progress.metrics['loss']:.6f}")
        save(progress)

    engine.step, checkpoints.save = step, saved  # type: ignore[method-assign]
    loop = TrainCausalLm(global_batch_size=4, steps=5, log_every=1, **fields)
    error = ""
    try:
        loop.run(
            ctx, engine, toy_data(), plan, checkpoints, source(ctx, Setting(wrap="ddp")), Told(said)
        )
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    checkpoints.close()
    engine.close()
    found = [line for line in records(ctx.run_dir / "metrics.jsonl") if "loss" in line]
    steps = [[line["step"], f"{line['loss']:.6f}"] for line in found]
    return {"said": said, "steps": steps, "error": error}


def one(tmp_path: Path, *arguments: Any) -> Any:
    return run_ranks(train, 1, str(tmp_path), *arguments)[0]


def test_a_step_is_read_behind_the_launch_of_the_next_and_at_once_before_a_save(
    tmp_path: Path,
) -> None:
    told = one(tmp_path, 3, {"eval_last": False}, {})
    losses = dict(told["steps"])
    assert list(losses) == [1, 2, 3, 4, 5]
    assert told["said"] == [
        "launch 1", "launch 2", "read 1", "told 1", "launch 3", "read 2", "told 2", "read 3",
        "told 3", f"save 3 with loss {losses[3]}", "launch 4", "launch 5", "read 4", "told 4",
        "read 5", "told 5", f"save 5 with loss {losses[5]}",
    ]  # fmt: skip


def test_an_evaluation_comes_behind_its_step(tmp_path: Path) -> None:
    said = one(tmp_path, None, {"eval_every": 2}, {})["said"]
    assert said.index("told 2") < said.index("evaluated 2") < said.index("launch 3")
    assert said.index("launch 4") < said.index("told 3") < said.index("evaluated 4")
    assert said.index("told 5") < said.index("evaluated 5")


@pytest.mark.parametrize(
    "fields", [{"anomalies": Anomalies(non_finite="skip")}, {"profile_steps": (2, 3)}]
)
def test_a_guard_or_a_profile_needs_the_numbers_at_once(fields: Any, tmp_path: Path) -> None:
    said = one(tmp_path, None, {"eval_last": False, **fields}, {})["said"]
    for step in (1, 2, 3):
        assert said.index(f"told {step}") < said.index(f"launch {step + 1}")
    late = said.index("launch 5") < said.index("told 4")
    assert late == ("profile_steps" in fields)


def test_a_gradient_that_is_not_finite_ends_the_run_before_anything_is_saved(
    tmp_path: Path,
) -> None:
    """Step 4 is launched by then, and would be saved."""
    told = one(tmp_path, 2, {"eval_last": False}, {3: NAN})
    assert told["error"].startswith(
        "StageError: step 3: the gradient norm is nan (samples 8 to 11 of the order) ("
    )
    assert [step for step, _ in told["steps"]] == [1, 2]
    assert [line for line in told["said"] if line.startswith("save")] == [
        f"save 2 with loss {told['steps'][1][1]}"
    ]


@pytest.mark.parametrize("norm", [1.0, NAN])
def test_a_step_that_fails_leaves_the_record_of_the_one_before(norm: float, tmp_path: Path) -> None:
    """Unless that one's gradient explains the failure."""
    told = one(tmp_path, None, {}, {3: norm}, 4)
    steps = [step for step, _ in told["steps"]]
    if norm == 1.0:
        assert (told["error"], steps) == ("ValueError: broken", [1, 2, 3])
    else:
        assert told["error"].startswith("StageError: step 3: the gradient norm is nan")
        assert steps == [1, 2]
