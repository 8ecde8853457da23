"""A run of train.hf_trainer: the Trainer with the recipe's samples, loss and optimizer."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from pipeline import (
    Callbacks,
    Context,
    Data,
    DataAxis,
    MicroBatch,
    ModelSource,
    OptimizerPlan,
    Phase,
    Precision,
    Progress,
    StageError,
    StepCallback,
    TrainedRun,
)
from pipeline.utils import sync, sync_tree
from stages.formats.stored import PROGRESS, read_json
from stages.train.batches import Feed, collate, microbatches
from stages.train.evaluation import heldout, heldout_targets, record_evaluation
from stages.train.hf_trainer import HfTrainer
from stages.train.lineage import lineage, require_same_lineage
from stages.train.loss import SummedLoss
from stages.train.report import Reporter
from stages.train.step import advance
from stages.wrap.accelerate_compat import reset_state
from stages.wrap.build import build_module, named_parameters
from stages.wrap.load_weights import stored_tensors


def train(
    config: HfTrainer,
    ctx: Context,
    data: Data,
    plan: OptimizerPlan,
    precision: Precision,
    model: ModelSource,
    callback: StepCallback | None,
) -> TrainedRun:
    """Train to the last step, from the newest complete checkpoint if there is one (collective)."""
    axis = DataAxis(index=ctx.dist.rank, count=ctx.dist.world_size)
    identity = lineage(config, ctx, data, model)
    newest, progress = _newest(ctx)
    require_same_lineage(identity, ctx.accept, progress)
    progress.lineage = identity
    feed = Feed(config, data, ctx.seed, axis, ctx.dist.device)
    ctx.on_exit(feed.close)
    steps = feed.total_steps(progress)
    if newest is not None and progress.step >= steps:
        ctx.log.info("nothing left to train: step %d of %d", progress.step, steps)
        return TrainedRun(checkpoint=str(newest), progress=progress)
    micro = config.microbatch_size(axis.count)
    accumulation = len(microbatches(config.global_batch_size, axis, micro))
    everyone = torch.distributed.group.WORLD
    module = build_module(ctx, model, precision, replicas=everyone, casts=True)
    optimizer = plan.build(plan.groups(named_parameters(module)))
    # The Trainer asks once more behind the last step.
    schedule = LambdaLR(optimizer, lambda step: plan.lr_scale(min(step, steps - 1), steps))
    trainer = _RecipeTrainer(
        model=module,
        args=_arguments(config, ctx, plan, accumulation, steps),
        train_dataset=data.train,
        loader=MicroBatches(feed, data, axis, accumulation, progress, steps),
        optimizers=(optimizer, schedule),
        frozen_base=frozenset(model.frozen_base),
    )
    ctx.on_exit(reset_state)
    trainer.remove_callback(PrinterCallback)
    reporter = Reporter(ctx, log_every=config.log_every, total_steps=feed.total_steps)
    callbacks = Callbacks(reporter, callback)
    callbacks.restore(progress.callbacks)
    ctx.metrics.rewind(progress.step)
    recorder = _Recorder(config, ctx, data, feed, progress, trainer, callbacks)
    trainer.add_callback(recorder)
    with ctx.dist.stop.deferred():
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
        if recorder.stopped:
            ctx.dist.stop.end()
    return TrainedRun(checkpoint=str(complete_checkpoints(_root(ctx))[-1]), progress=progress)


def _root(ctx: Context) -> Path:
    return ctx.run_dir / "checkpoints"


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoints that were saved completely, so have a progress; oldest first."""
    found = [path.parent for path in root.glob(f"checkpoint-*/{PROGRESS}")]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def _newest(ctx: Context) -> tuple[Path | None, Progress]:
    """The newest checkpoint that rank 0 finds, and its progress. Raises CheckpointError."""
    found = complete_checkpoints(_root(ctx))[-1:] if ctx.dist.is_main else []
    name = ctx.dist.broadcast_str("".join(path.name for path in found))
    if not name:
        return None, Progress()
    newest = _root(ctx) / name
    return newest, Progress.from_record(read_json(newest / PROGRESS))


def _arguments(
    config: HfTrainer, ctx: Context, plan: OptimizerPlan, accumulation: int, steps: int
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(_root(ctx)),
        per_device_train_batch_size=config.microbatch_size(ctx.dist.world_size),
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        max_grad_norm=plan.max_grad_norm or 0.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=config.save_every or steps,
        save_total_limit=None,  # the recorder removes old ones, once a newer one is complete
        ignore_data_skip=True,  # the loader begins behind the progress
        remove_unused_columns=False,
        disable_tqdm=True,
        seed=ctx.seed,
        use_cpu=ctx.dist.device.type == "cpu",
        **{"report_to": "none", **config.arguments},
    )


@dataclass(eq=False)
class MicroBatches:
    """This rank's micro-batches of all steps behind `progress`, as one epoch of the Trainer. Every
    step has `accumulation` of them; empty ones, which change no number, fill up short steps."""

    feed: Feed
    data: Data
    axis: DataAxis
    accumulation: int
    progress: Progress
    steps: int

    @property
    def dataset(self) -> Any:
        """The training samples; accelerate asks for them."""
        return self.data.train

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[dict[str, Any]]:
        position = self.progress.samples
        for _ in range(self.progress.step, self.steps):
            scale = self.axis.count / self.feed.targets(position)
            batches = [batch for batch, _ in self.feed.microbatches(position)]
            empty = collate([], self.data.pad_id, batches[0].input_ids.device)
            for batch in [*batches, *[empty] * (self.accumulation - len(batches))]:
                tensors = {key: value for key, value in vars(batch).items() if value is not None}
                yield {**tensors, "scale": scale}
            position += self.feed.count(position)


class _RecipeTrainer(Trainer):  # type: ignore[misc]
    """The Trainer with the recipe's samples and loss."""

    loss_is_scaled_for_ga = True

    def __init__(self, *, loader: MicroBatches, frozen_base: Set[str], **rest: Any) -> None:
        super().__init__(**rest)
        self._loader = loader
        self._frozen_base = frozen_base
        if frozen_base:  # otherwise a resume reports it as missing
            self.model._keys_to_ignore_on_save = frozen_base

    def get_train_dataloader(self) -> MicroBatches:
        return self._loader

    def _save(self, output_dir: str, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save without a frozen base, and then without the description of the whole model too."""
        if not self._frozen_base:
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            own = {
                name: tensor.detach()
                for name, tensor in stored_tensors(self.model)
                if name not in self._frozen_base
            }
            save_file(own, Path(output_dir) / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def get_batch_samples(
        self, batches: Iterator[dict[str, Any]], count: int, *rest: Any
    ) -> tuple[list[dict[str, Any]], None]:
        """A step's micro-batches. The scale of the loss comes with each, so nothing is counted."""
        return list(itertools.islice(batches, count)), None

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *rest: Any, **named: Any
    ) -> Tensor:
        """The sum over this micro-batch's target tokens, over the mean number of a rank's targets
        in the step: averaged over ranks, the mean over all target tokens of the step."""
        batch = MicroBatch(**{name: one for name, one in inputs.items() if name != "scale"})
        loss: Tensor = SummedLoss()(model, batch) * inputs["scale"]
        return loss


@dataclass(eq=False)
class _Recorder(TrainerCallback):  # type: ignore[misc]
    """Keeps the progress, evaluates, calls the step callbacks, and completes checkpoints."""

    config: HfTrainer
    ctx: Context
    data: Data
    feed: Feed
    progress: Progress
    trainer: Trainer
    callbacks: Callbacks
    stopped: bool = False
    """Whether training ends, saved, because a rank was asked to stop."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Give a sign of life."""
        self.ctx.dist.heartbeat.beat(Phase.STEP, step=self.progress.step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Advance the progress; stop if a rank was asked to."""
        advance(self.progress, self.feed)
        dist = self.ctx.dist
        if dist.any(dist.stop.asked):
            self.stopped = control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **rest: Any) -> None:
        """Record the step; evaluate if it is due. Raises StageError for a non-finite gradient."""
        if "loss" not in logs:
            return
        progress, norm, loss = self.progress, float(logs["grad_norm"]), float(logs["loss"])
        if not math.isfinite(norm):
            raise StageError(
                f"step {progress.step}: the gradient norm is {norm}",
                hint="lower the learning rate, or look for broken samples",
            )
        progress.metrics["loss"] = loss
        record = {
            "grad_norm": norm, "tokens": progress.tokens, "samples": progress.samples,
            "applied": True, "loss_scale": 1.0, "time": time.time(), "loss": loss,
        }  # fmt: skip
        self.callbacks.on_step(progress.step, progress, record)
        every = self.config.eval_every
        due = progress.step == args.max_steps or (every is not None and progress.step % every == 0)
        if due and self.data.heldout is not None:
            self._evaluate()

    def _evaluate(self) -> None:
        model, dist, progress = self.trainer.model_wrapped, self.ctx.dist, self.progress
        axis = DataAxis(index=dist.rank, count=dist.world_size)
        size = self.config.microbatch_size(axis.count)
        objective, summed = SummedLoss(), torch.zeros((), device=dist.device)
        model.eval()
        with torch.no_grad():
            for batch in heldout(self.data, axis, dist.device, size):
                summed += objective(model, batch)
        model.train()
        if axis.count > 1:
            torch.distributed.all_reduce(summed)
        record = record_evaluation(progress, float(summed) / heldout_targets(self.data), None)
        self.callbacks.on_evaluation(progress.step, progress, record)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Mark the checkpoint as complete, then remove those that need not be kept."""
        dist, root, keep = self.ctx.dist, _root(self.ctx), self.config.keep
        self.progress.callbacks = self.callbacks.state()
        dist.barrier()  # every rank has written its random state
        if dist.is_main:
            newest = root / f"checkpoint-{state.global_step}"
            sync_tree(newest)
            (newest / PROGRESS).write_text(json.dumps(vars(self.progress), indent=1), "utf-8")
            sync(newest / PROGRESS)
            for old in [] if keep is None else complete_checkpoints(root)[:-keep]:
                (old / PROGRESS).unlink()
                shutil.rmtree(old)
        dist.barrier()
