"""The report of a training: lines on screen, records in `metrics.jsonl`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline import IN_DISPLAY, Context, Progress, StepCallback, WrittenCheckpoint
from pipeline.utils import duration

QUIET_SECONDS = 30.0
"""Seconds of training after which the next step has a line, whatever `log_every` says."""


class Reporter(StepCallback):
    """Writes a record of every step, and shows a line every `log_every` steps, for the first step
    and when no line came for QUIET_SECONDS."""

    def __init__(
        self, ctx: Context, *, log_every: int, total_steps: Callable[[Progress], int]
    ) -> None:
        self._ctx = ctx
        self._log_every = log_every
        self._total_steps = total_steps
        self._unshown: list[Mapping[str, float]] = []
        self._last, self._total = 0, 0

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        first = not self._last
        self._last, self._total = step, self._total_steps(progress)
        self._write(step, progress, {**record, "total_steps": self._total})
        self._unshown.append(record)
        silent = sum(one["step_seconds"] for one in self._unshown)
        if first or silent >= QUIET_SECONDS or step % self._log_every == 0:
            self.show()

    def on_evaluation(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        self._write(step, progress, {**record, "time": time.time()})
        mark = "  (the best so far)" if progress.best.get("step") == step else ""
        self._ctx.log.info(
            f"step {step}  eval_loss {record['eval_loss']:.4f}  "
            f"perplexity {record['perplexity']:.2f}{mark}",
            extra=IN_DISPLAY,
        )

    def anomaly(self, step: int, facts: Mapping[str, Any]) -> None:
        """Report a step without update. Its record has the next step's number and no `loss`."""
        self._ctx.metrics.write_training({"step": step, "time": time.time(), **_json(facts)})
        shown = "  ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
        self._ctx.log.warning(shown)

    def generated(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Report texts that were generated."""
        self._ctx.metrics.write_training(
            {"step": step, "time": time.time(), "generated": list(samples)}
        )
        for sample in samples:
            answer = sample["text"] if sample["text"].strip() else "(empty answer)"
            text = f"{sample['prompt']} -> {answer}"
            self._ctx.log.info("step %d  %s", step, text.replace("\n", " "))

    def ended_early(self, step: int, total: int, reason: str, *, again: bool) -> None:
        """Report why training ends before its last step; `again` if a run that had ended so is
        resumed, whose record is there."""
        self.show()
        self._ctx.log.info("training ends early, at step %d of %d: %s", step, total, reason)
        if not again:
            self._ctx.metrics.write_training(
                {"step": step, "time": time.time(), "ended_early": reason}
            )

    def nothing_left(self, step: int, total: int, shortfall: str) -> None:
        """Report that a resumed training has no step to take, with the new total for readers;
        `shortfall` says that its recipe asks for less than is done, if it does."""
        if shortfall:
            self._ctx.log.warning("%s", shortfall)
        else:
            self._ctx.log.info("nothing left to train: step %d of %d", step, total)
        self._ctx.metrics.write_length(step, total)

    def saved(self, step: int, *, stalled: float) -> None:
        """Report a checkpoint, for which training paused for `stalled` seconds."""
        record = {"step": step, "time": time.time(), "checkpoint_stall_seconds": stalled}
        self._ctx.metrics.write_training(record)

    def written(self, checkpoint: WrittenCheckpoint, *, slowed: float | None) -> None:
        """Report a checkpoint that is on disk. Steps took `slowed` seconds more while it was
        written, if that is known."""
        record = {
            "step": checkpoint.step,
            "time": time.time(),
            "checkpoint_seconds": checkpoint.seconds,
            "checkpoint_bytes": checkpoint.size,
            "checkpoint_user_seconds": checkpoint.user_seconds,
            "checkpoint_system_seconds": checkpoint.system_seconds,
        }
        if slowed is not None:
            record["checkpoint_slowed_seconds"] = slowed
        self._ctx.metrics.write_training(record)

    def rewind(self, step: int) -> None:
        """Drop reports of steps after `step`."""
        self._unshown.clear()
        self._ctx.metrics.rewind(step)

    def show(self) -> None:
        """Show a line for the steps since the last line, if there are any."""
        if self._unshown:
            line = "  ".join(self._line(self._unshown))
            self._ctx.log.info(line, extra=IN_DISPLAY)
            self._unshown = []

    def _write(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        # The best is repeated in every record, so that readers only need the last line.
        best = {f"best_{name}": value for name, value in progress.best.items()}
        self._ctx.metrics.write_training({"step": step, **_json(record), **best})

    def _line(self, records: Sequence[Mapping[str, float]]) -> list[str]:
        """The last step's numbers, and mean speeds of all."""
        last = records[-1]
        parts = [f"step {self._last}/{self._total}", f"loss {last['loss']:.4f}"]
        parts.append(f"grad_norm {last['grad_norm']:.3f}")
        if math.isfinite(last["lr"]):
            parts.append(f"lr {last['lr']:.3g}")
        parts.append(f"{_mean(records, 'tokens_per_second'):.0f} tokens/s")
        if "mfu" in last:
            parts.append(f"mfu {_mean(records, 'mfu'):.1%}")
        seconds = sum(record["step_seconds"] for record in records) / len(records)
        left = duration((self._total - self._last) * seconds)
        return [*parts, f"{seconds:.2f} s/step", f"eta {left}"]


def _json(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with None for numbers that JSON lacks."""
    odd = {k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    return {name: None if name in odd else value for name, value in record.items()}


def _mean(records: Sequence[Mapping[str, float]], name: str) -> float:
    """Mean of a number over the time of all records."""
    seconds = sum(record["step_seconds"] for record in records)
    return float(sum(record[name] * record["step_seconds"] for record in records) / seconds)
