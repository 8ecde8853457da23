"""What a person and a program see of the training: lines on screen, records in `metrics.jsonl`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed

from pipeline.contracts.engine import Engine
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Progress
from pipeline.hardware import host
from stages.train.evaluation import perplexity
from stages.train.flops import Utilisation
from stages.train.profiling import Profile
from stages.train.step import StepResult

SLOW_DATA = 0.05
"""Share of a step's time that is waited for data from which on the line says so."""


class Reporter:
    """Writes a record of every step when it is done, and shows a line every `log_every` steps."""

    def __init__(
        self,
        ctx: Context,
        engine: Engine,
        *,
        log_every: int,
        total_steps: Callable[[Progress], int],
        progress: Progress,
        utilisation: Utilisation | None = None,
    ) -> None:
        self._ctx = ctx
        self._engine = engine
        self._every = log_every
        self._total = total_steps
        self._progress = progress
        self._utilisation = utilisation
        self._unshown: list[dict[str, Any]] = []
        self._since = time.perf_counter()
        self._tokens, self._samples = progress.tokens, progress.samples

    def add(self, done: StepResult, profile: Profile | None = None) -> None:
        """Report a step, once the progress has moved on (collective). One with a `profile` took the
        time that that says. The host has waited for the step's gradient norm already, so to read
        the loss costs a small sum over ranks and no more waiting."""
        now, progress = time.perf_counter(), self._progress
        seconds = now - self._since if profile is None else profile.seconds
        ranks = self._engine.shard.count
        total = summed(done, ranks)
        record = {
            "step": progress.step,
            "grad_norm": _finite(done.report.grad_norm),
            "lr": done.lr,
            "tokens": progress.tokens,
            "samples": progress.samples,
            "applied": done.report.applied,
            "loss_scale": done.report.loss_scale,
            "time": time.time(),
            "step_seconds": seconds,
            "target_tokens_per_second": (progress.tokens - self._tokens) / seconds,
            "samples_per_second": (progress.samples - self._samples) / seconds,
            "loss": _finite(total.loss),
            "tokens_per_second": total.tokens / seconds,
            "tokens_per_second_per_rank": total.tokens / seconds / ranks,
            "data_wait_share": total.waited / seconds / ranks,
            **peak_memory(self._engine.device, ranks),
            **_best(progress),
        }
        if self._utilisation is not None:
            record["mfu"] = self._utilisation.share(total.tokens, total.squares, seconds * ranks)
        if profile is not None:
            record |= {"profiled": True, "communication_share": profile.communication}
        self._ctx.metrics.write(record)
        self._keep_loss(total.loss)
        self._begin(now)
        self._unshown.append(record)
        if progress.step % self._every == 0:
            self.show()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Show what has not been shown, then keep the body's time (evaluation, saving) out of the
        speed of training."""
        self.show()
        yield
        self._begin(time.perf_counter())

    def evaluated(self, loss: float) -> None:
        """Report a held-out loss, which the progress knows already."""
        step = self._progress.step
        record = {
            "step": step,
            "eval_loss": _finite(loss),
            "perplexity": _finite(perplexity(loss)),
            **_best(self._progress),
        }
        self._ctx.metrics.write(record)
        mark = "  (the best so far)" if record.get("best_step") == step else ""
        self._ctx.log.info(
            f"step {step}  eval_loss {loss:.4f}  perplexity {perplexity(loss):.2f}{mark}"
        )

    def anomalous(self, facts: dict[str, Any]) -> None:
        """Report a step that no update came of. The record is filed under the step that the next
        batch is for, and has no `loss`: one by that name is that of an update."""
        told = {name: _finite(v) if isinstance(v, float) else v for name, v in facts.items()}
        self._ctx.metrics.write({"step": self._progress.step + 1, **told})
        shown = "  ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
        self._ctx.log.warning(shown)
        self._begin(time.perf_counter())

    def saved(self, *, stalled: float, seconds: float) -> None:
        """Report the newest checkpoint, which is on disk: for how long training stood still for it,
        and how long all of it took."""
        self._ctx.metrics.write(
            {
                "step": self._progress.step,
                "checkpoint_stall_seconds": stalled,
                "checkpoint_seconds": seconds,
            }
        )

    def rewound(self) -> None:
        """The progress is that of an earlier step again: forget those after it."""
        self._unshown.clear()
        self._ctx.metrics.rewind(self._progress.step)
        self._begin(time.perf_counter())

    def show(self) -> None:
        """A line for the steps that none has been shown of: the last one's numbers, and their mean
        speed."""
        if self._unshown:
            self._line(self._unshown)
            self._unshown = []

    def _begin(self, now: float) -> None:
        """What comes counts from here."""
        self._since = now
        self._tokens, self._samples = self._progress.tokens, self._progress.samples

    def _keep_loss(self, value: float) -> None:
        """Let the progress have the newest loss, which is none if it is not finite."""
        self._progress.metrics.pop("loss", None)
        if math.isfinite(value):
            self._progress.metrics["loss"] = value

    def _line(self, records: list[dict[str, Any]]) -> None:
        last = records[-1]
        seconds = sum(record["step_seconds"] for record in records) / len(records)
        total = self._total(self._progress)
        minutes, left = divmod(round((total - last["step"]) * seconds), 60)
        parts = [
            f"step {last['step']}/{total}",
            f"loss {_shown(last['loss'], '.4f')}",
            f"grad_norm {_shown(last['grad_norm'], '.3f')}",
            *([] if last["lr"] is None else [f"lr {last['lr']:.3g}"]),
            f"{mean_of(records, 'tokens_per_second'):.0f} tokens/s",
            *([f"mfu {mean_of(records, 'mfu'):.1%}"] if "mfu" in last else []),
            f"{seconds:.2f} s/step",
        ]
        waited = mean_of(records, "data_wait_share")
        if waited >= SLOW_DATA:
            parts.append(f"{waited:.0%} of it waiting for data")
        self._ctx.log.info("  ".join([*parts, f"eta {minutes}:{left:02d}"]))


def _best(progress: Progress) -> dict[str, float]:
    """In every record, so that who wants to know needs no more than the end of the file."""
    best = progress.best
    return {"best_step": best["step"], "best_eval_loss": best["eval_loss"]} if best else {}


def _shown(value: float | None, form: str) -> str:
    return "nan" if value is None else format(value, form)


def _finite(value: float) -> float | None:
    """JSON has no word for infinity."""
    return value if math.isfinite(value) else None


class Sums(NamedTuple):
    """Of one step over all ranks."""

    loss: float
    """Mean over target tokens, in nats."""
    tokens: float
    """Without padding."""
    squares: float
    """Squared lengths of samples."""
    waited: float
    """Seconds that ranks waited for data."""


def summed(step: StepResult, ranks: int) -> Sums:
    """A step's numbers over all ranks (collective)."""
    taken = step.taken
    sums = torch.tensor(
        [0.0, float(taken.tokens), float(taken.squares), taken.seconds],
        dtype=torch.float64,
        device=step.loss.device,
    )
    sums[0] = step.loss
    if ranks > 1:
        torch.distributed.all_reduce(sums)
    return Sums(*sums.tolist())


def peak_memory(device: torch.device, ranks: int) -> dict[str, int]:
    """Most bytes that were taken at once on one rank since the start (collective), as far as they
    are known: by torch's tensors on its GPU, by the model and its training of its host memory.
    `pipeline.hardware.host` says what is counted there."""
    on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    most = torch.tensor([on_gpu, host.peak_beyond() or 0], device=device)
    if ranks > 1:
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    names = ("peak_memory_bytes", "peak_host_memory_bytes")
    return {name: int(size) for name, size in zip(names, most.tolist(), strict=True) if size}


def mean_of(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of a number per step, over the time of all of them."""
    seconds = sum(record["step_seconds"] for record in records)
    return float(sum(record[name] * record["step_seconds"] for record in records) / seconds)
