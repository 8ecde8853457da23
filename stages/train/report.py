"""The report of a training: lines on screen, records in `metrics.jsonl`, and what saves cost."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline import (
    IN_DISPLAY,
    Checkpoints,
    Context,
    Progress,
    StepCallback,
    WrittenCheckpoint,
)
from pipeline.utils import duration
from stages.batches.feed import BatchStats

QUIET_SECONDS = 30.0
"""Seconds of training after which the next step has a line, whatever `log_every` says."""
FEWEST, MOST = 3, 20
"""Steps without a concurrent save, whose median is the baseline step time."""
MOST_DURING = 10_000
"""Most steps tracked during one save; the slowdown by longer saves is not reported."""


@dataclass(eq=False)
class Reporter(StepCallback):
    """Writes a record of every step, and shows a line every `log_every` steps, for the first step
    and when no line came for QUIET_SECONDS."""

    ctx: Context
    log_every: int
    total_steps: Callable[[Progress], int]
    _unshown: list[Mapping[str, float]] = field(default_factory=list)
    _last: int = 0
    _total: int = 0

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        first = not self._last
        self._last, self._total = step, self.total_steps(progress)
        self.write(step, {**record, "total_steps": self._total}, progress.best)
        self._unshown.append(record)
        silent = sum(one["step_seconds"] for one in self._unshown)
        if first or silent >= QUIET_SECONDS or step % self.log_every == 0:
            self.show()

    def on_evaluation(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        self.write(step, {**record, "time": time.time()}, progress.best)
        mark = "  (the best so far)" if progress.best.get("step") == step else ""
        self.ctx.log.info(
            f"step {step}  eval_loss {record['eval_loss']:.4f}  "
            f"perplexity {record['perplexity']:.2f}{mark}",
            extra=IN_DISPLAY,
        )

    def anomaly(self, step: int, facts: Mapping[str, Any]) -> None:
        """Report a step without update. Its record has the next step's number and no `loss`."""
        self.write(step, facts)
        shown = "  ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
        self.ctx.log.warning(shown)

    def generated(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Report texts that were generated."""
        self.write(step, {"generated": list(samples)})
        for sample in samples:
            answer = sample["text"] if sample["text"].strip() else "(empty answer)"
            text = f"{sample['prompt']} -> {answer}"
            self.ctx.log.info("step %d  %s", step, text.replace("\n", " "))

    def ends_early(
        self, progress: Progress, total: int, reason: str,
        before: Callable[[], object] = lambda: None,
    ) -> bool:  # fmt: skip
        """Whether training ends before its last step, for a `reason` that is not empty; reports it,
        after calling `before` (collective). It is decided again after a resume, as the recipe may
        have changed; an end that is confirmed keeps its first wording and its record."""
        known = progress.stopped
        progress.stopped = reason and (known or reason)
        if not reason:
            return False
        before()
        self.show()
        message = "training ends early, at step %d of %d: %s"
        self.ctx.log.info(message, progress.step, total, progress.stopped)
        if not known:
            self.write(progress.step, {"ended_early": progress.stopped})
        return True

    def nothing_left(self, step: int, total: int, shortfall: str) -> None:
        """Report that a resumed training has no step to take, with the new total for readers;
        `shortfall` says that its recipe asks for less than is done, if it does."""
        if shortfall:
            self.ctx.log.warning("%s", shortfall)
        else:
            self.ctx.log.info("nothing left to train: step %d of %d", step, total)
        self.ctx.metrics.write_length(step, total)

    def rewind(self, step: int) -> None:
        """Drop reports of steps after `step`."""
        self._unshown.clear()
        self.ctx.metrics.rewind(step)

    def show(self) -> None:
        """Show a line for the steps since the last line, if there are any: the last step's numbers,
        and mean speeds of all."""
        if not self._unshown:
            return
        records, self._unshown = self._unshown, []
        last, seconds = records[-1], sum(record["step_seconds"] for record in records)

        def mean(name: str) -> float:
            """Mean of a number over the time of all records."""
            return sum(record[name] * record["step_seconds"] for record in records) / seconds

        parts = [f"step {self._last}/{self._total}", f"loss {last['loss']:.4f}"]
        parts.append(f"grad_norm {last['grad_norm']:.3f}")
        if math.isfinite(last["lr"]):
            parts.append(f"lr {last['lr']:.3g}")
        parts.append(f"{mean('tokens_per_second'):.0f} tokens/s")
        if "mfu" in last:
            parts.append(f"mfu {mean('mfu'):.1%}")
        each = seconds / len(records)
        left = duration((self._total - self._last) * each)
        line = "  ".join([*parts, f"{each:.2f} s/step", f"eta {left}"])
        self.ctx.log.info(line, extra=IN_DISPLAY)

    def write(self, step: int, record: Mapping[str, Any], best: Mapping[str, Any] = {}) -> None:
        """Write a record, and with it the best evaluation so far."""
        # The best is repeated in every record of a step, so that readers only need the last line.
        repeated = {f"best_{name}": value for name, value in best.items()}
        now = {} if "time" in record else {"time": time.time()}
        self.ctx.metrics.write_training({"step": step, **now, **record, **repeated})


def step_record(
    progress: Progress, batch: BatchStats, *, seconds: float, trained: tuple[int, int], ranks: int,
    shares: int, loss: float, grad_norm: float, rates: Mapping[str, float], when: float,
    applied: bool = True, loss_scale: float = 1.0,
) -> dict[str, float]:  # fmt: skip
    """The record of a step that took `seconds` and ended at `when`, with the statistics of its
    batch on all ranks. The data are divided among `shares` of the ranks; `trained` are the target
    tokens and samples of the time."""
    targets, samples = trained
    return {
        "grad_norm": grad_norm,
        **rates,
        "tokens": progress.tokens,
        "samples": progress.samples,
        "applied": applied,
        "loss_scale": loss_scale,
        "time": when,
        "step_seconds": seconds,
        "target_tokens_per_second": targets / seconds,
        "samples_per_second": samples / seconds,
        "loss": loss,
        "tokens_per_second": batch.tokens / seconds,
        "tokens_per_second_per_rank": batch.tokens / seconds / ranks,
        "data_wait_share": batch.seconds / seconds / shares,
    }


@dataclass(kw_only=True, eq=False)
class Saves(StepCallback):
    """Checkpoints that training writes, each reported once when it is saved, and once when it is on
    disk and the steps during it are known."""

    checkpoints: Checkpoints
    reporter: Reporter
    newest: int
    """Step of the newest checkpoint."""
    _writes: bool = False
    """Whether a save may be being written."""
    _written: list[WrittenCheckpoint] = field(default_factory=list)
    """Saves that are on disk and not yet reported so."""
    _undisturbed: deque[float] = field(default_factory=lambda: deque(maxlen=MOST))
    """Seconds of the newest steps without a concurrent save."""
    _during: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_DURING))
    """Beginnings and seconds of the steps since the save that is being written."""

    def save(self, progress: Progress) -> None:
        """Save (collective). A second save of a step only amends its checkpoint."""
        began = time.perf_counter()
        self.checkpoints.save(progress)
        stalled = time.perf_counter() - began
        self.poll()
        self._report()
        if progress.step != self.newest:
            self.newest, self._writes = progress.step, True
            self._during.clear()
            self.reporter.write(progress.step, {"checkpoint_stall_seconds": stalled})

    def finish(self) -> str:
        """Wait until the last checkpoint is on disk; returns its address (collective)."""
        last = self.checkpoints.finish()
        self.poll()
        self._report()
        return last

    def poll(self) -> None:
        """Look after the save that is being written. Raises CheckpointError if it failed."""
        self._written += self.checkpoints.poll()

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        ended, seconds = record["time"], record["step_seconds"]
        if self._writes and not record.get("profiled"):
            self._during.append((ended - seconds, seconds))
        elif not record.get("profiled"):
            self._undisturbed.append(seconds)
        self._report(until=ended)

    def _report(self, until: float = math.inf) -> None:
        """Report saves that had completed by `until`, when all overlapping steps have been
        measured: by how many seconds these were longer than as many steps before, unless too few
        are known."""
        while self._written and (ended := self._written[0].ended) <= until:
            during = [seconds for began, seconds in self._during if began < ended]
            done = self._written.pop(0)
            record = {
                "checkpoint_seconds": done.seconds,
                "checkpoint_bytes": done.size,
                "checkpoint_user_seconds": done.user_seconds,
                "checkpoint_system_seconds": done.system_seconds,
            }
            if not during or (len(self._undisturbed) >= FEWEST and len(self._during) < MOST_DURING):
                usual = statistics.median(self._undisturbed) if during else 0.0
                slowed = sum((seconds - usual for seconds in during), 0.0)
                record["checkpoint_slowed_seconds"] = slowed
            self.reporter.write(done.step, record)
            self._undisturbed += [seconds for began, seconds in self._during if began >= ended]
            self._writes = False
            self._during.clear()
