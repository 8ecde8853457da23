"""What a training by the Trainer leaves: metrics, lines on screen, and which checkpoints are
whole."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from pipeline.contracts.data import Data
from pipeline.contracts.engine import DataAxis
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Progress
from pipeline.errors import StageError
from pipeline.utils.files import sync, sync_tree
from stages.formats.stored import PROGRESS, read_json
from stages.train.batches import MicroBatch, collate
from stages.train.evaluation import note, perplexity
from stages.train.feed import Feed


def whole_checkpoints(root: Path) -> list[Path]:
    """Checkpoints that were saved to their end, oldest first: those that have a progress."""
    found = [path.parent for path in root.glob(f"checkpoint-*/{PROGRESS}")]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def read_progress(checkpoint: Path) -> Progress:
    """Raises CheckpointError when it is damaged."""
    return Progress.from_record(read_json(checkpoint / PROGRESS))


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Keeps the progress, and reports it as the common loop does."""

    def __init__(
        self,
        ctx: Context,
        feed: Feed,
        progress: Progress,
        root: Path,
        steps: int,
        *,
        log_every: int,
        keep: int | None,
        evaluate: Callable[[int], float | None],
    ) -> None:
        self._ctx = ctx
        self._feed = feed
        self._progress = progress
        self._root = root
        self._steps = steps
        self._log_every = log_every
        self._keep = keep
        self._evaluate = evaluate
        ctx.metrics.rewind(progress.step)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Advance, and evaluate when it is due."""
        progress = self._progress
        progress.tokens += self._feed.targets(progress.samples)
        progress.samples += self._feed.count(progress.samples)
        progress.step = state.global_step
        for name in ("eval_loss", "perplexity"):  # they were those of other weights
            progress.metrics.pop(name, None)
        loss = self._evaluate(progress.step)
        if loss is not None:
            note(progress, loss, None)
            told = {"eval_loss": loss, "perplexity": perplexity(loss)}
            self._ctx.metrics.write({"step": progress.step, **told})
            self._ctx.log.info("step %d  eval_loss %.4f", progress.step, loss)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **rest: Any) -> None:
        """A record a step. Raises StageError on a gradient that is not finite."""
        if "loss" not in logs:
            return
        progress, norm, loss = self._progress, float(logs["grad_norm"]), float(logs["loss"])
        if not math.isfinite(norm):
            raise StageError(
                f"step {progress.step}: the gradient norm is {norm}",
                hint="lower the learning rate, or look for broken samples",
            )
        progress.metrics["loss"] = loss
        self._ctx.metrics.write(
            {
                "step": progress.step, "grad_norm": norm, "tokens": progress.tokens,
                "samples": progress.samples, "applied": True, "loss_scale": 1.0,
                "time": time.time(), "loss": loss,
            }
        )  # fmt: skip
        if progress.step % self._log_every == 0:
            self._ctx.log.info(
                f"step {progress.step}/{self._steps}  loss {loss:.4f}  grad_norm {norm:.3f}"
            )

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Mark the checkpoint as whole, then remove what need not be kept."""
        dist = self._ctx.dist
        dist.barrier()  # every rank has written its random state
        if dist.is_main:
            newest = self._root / f"checkpoint-{state.global_step}"
            sync_tree(newest)
            (newest / PROGRESS).write_text(json.dumps(vars(self._progress), indent=1), "utf-8")
            sync(newest / PROGRESS)
            if self._keep is not None:
                for old in whole_checkpoints(self._root)[: -self._keep]:
                    (old / PROGRESS).unlink()
                    shutil.rmtree(old)
        dist.barrier()


class MicroBatches:
    """This rank's micro-batches of the whole training, as many in each step, as one epoch.

    Iterating starts behind `progress`. Where a step's samples do not make as many micro-batches,
    empty ones fill it up, which changes no number.
    """

    def __init__(
        self, feed: Feed, data: Data, shard: DataAxis, accumulation: int, progress: Progress
    ) -> None:
        self.dataset = data.train
        self._feed = feed
        self._pad_id = data.pad_id
        self._count = shard.count
        self._accumulation = accumulation
        self._progress = progress
        self._steps = feed.total_steps(progress)

    def __len__(self) -> int:
        return self._steps * self._accumulation

    def __iter__(self) -> Iterator[dict[str, Any]]:
        position = self._progress.samples
        for _ in range(self._progress.step, self._steps):
            targets = self._feed.targets(position)
            batches = [batch for batch, _ in self._feed.microbatches(position)]
            device = batches[0].input_ids.device
            empty = self._accumulation - len(batches)
            batches += [collate([], self._pad_id, device) for _ in range(empty)]
            for batch in batches:
                yield {**_inputs(batch), "scale": self._count / targets}
            position += self._feed.count(position)


def micro_batch(inputs: dict[str, Any]) -> MicroBatch:
    """What the loader has made of a micro-batch, back."""
    return MicroBatch(
        input_ids=inputs["input_ids"], labels=inputs["labels"], positions=inputs.get("positions")
    )


def _inputs(batch: MicroBatch) -> dict[str, Any]:
    return {key: value for key, value in vars(batch).items() if value is not None}
