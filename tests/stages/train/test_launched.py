"""When the numbers of a step are read, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.callbacks import StepCallback
from pipeline.contracts.engine import StepReport
from pipeline.contracts.metrics import records
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.optimizer.adamw import AdamW
from stages.train.causal_lm import TrainCausalLm
from stages.train.settings import Anomalies
from tests.support.processes import run_ranks
from tests.support.runs import context, toy_data
from tests.support.state import Setting, make_engine, source

NAN = float("nan")


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
    dist: DistContext,
    folder: str,
    every: int | None,
    fields: dict[str, Any],
    norms: dict[int, float],
    breaks_at: int = 0,
) -> dict[str, Any]:
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
