"""A run of train.hf_trainer: the Trainer with the recipe's samples, loss and optimizer."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from pipeline import (
    Callbacks,
    Context,
    Data,
    DataAxis,
    MicroBatch,
    ModelSource,
    OptimizerPlan,
    Precision,
    Progress,
    ResumeRefused,
    StageError,
    StepCallback,
    TrainedRun,
)
from stages.batches.feed import BatchStats, Feed, microbatches
from stages.batches.layout import collate
from stages.formats.stored import PROGRESS, read_json
from stages.hf.accelerate_compat import reset_state
from stages.hf.trainer_fields import TrainerFields, several_rules
from stages.hf.trainer_record import Recorder, complete_checkpoints, root
from stages.model.rotary_compat import placed
from stages.objectives.cross_entropy import CrossEntropy
from stages.objectives.judge import judged
from stages.objectives.scoring import ModelScorer
from stages.train.report import Reporter
from stages.train.resuming import Length, lineage, require_same_lineage
from stages.wrap.build import build_module
from stages.wrap.optimizer_state import make_optimizers
from stages.wrap.shards import stored_tensors


def train(
    config: TrainerFields,
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
    progress.lineage = identity | {"frozen": _frozen(model, newest, progress)}
    feed = Feed(config, data, ctx.seed, axis, ctx.dist.device, vocabulary=model.vocab_size)
    ctx.on_exit(feed.close)
    steps = feed.total_steps(progress)
    reporter = Reporter(ctx, log_every=config.log_every, total_steps=feed.total_steps)
    ctx.metrics.rewind(progress.step)
    if newest is not None and progress.step >= steps:
        shortfall = Length.of(config, data, progress).shortfall(ctx.slot)
        reporter.nothing_left(progress.step, steps, shortfall)
        progress.stopped = ""
        return TrainedRun(checkpoint=str(newest), progress=progress)
    micro = config.microbatch_size(axis.count)
    accumulation = len(microbatches(config.global_batch_size, axis, micro))
    everyone = torch.distributed.group.WORLD
    module = build_module(ctx, model, precision, replicas=everyone, casts=True)
    for problem in several_rules(plan.rules):  # the stage may not declare them to `pipe check`
        raise StageError(problem.message, hint=problem.hint)
    ((_, part, optimizer),) = make_optimizers(plan, module)
    # The Trainer asks once more after the last step.
    schedule = LambdaLR(optimizer, lambda step: part.lr_scale(min(step, steps - 1), steps))
    loader = MicroBatches(feed, data, axis, accumulation, progress, steps)
    trainer = _RecipeTrainer(
        model=module,
        args=_arguments(config, ctx, plan, accumulation, steps),
        train_dataset=data.train,
        loader=loader,
        optimizers=(optimizer, schedule),
        frozen_base=frozenset(model.frozen_base),
    )
    ctx.on_exit(reset_state)
    trainer.remove_callback(PrinterCallback)
    callbacks = Callbacks(reporter, callback)
    callbacks.restore(progress.callbacks)
    callbacks.state()  # one that cannot be saved is found before anything is trained
    recorder = Recorder(
        config, ctx, data, feed, plan, progress, trainer, reporter, callbacks, loader.taken
    )
    trainer.add_callback(recorder)
    if recorder.ends_early(steps):
        if newest is None:
            recorder.evaluate()
            trainer.save_untrained()
        checkpoint = newest or complete_checkpoints(root(ctx))[-1]
        return TrainedRun(checkpoint=str(checkpoint), progress=progress)
    with ctx.dist.stop.deferred():
        # The Trainer resumes no checkpoint of step 0, whose weights are those that it has.
        trainer.train(resume_from_checkpoint=str(newest) if progress.step else None)
        if recorder.stopped:
            ctx.dist.stop.end()
    return TrainedRun(checkpoint=str(complete_checkpoints(root(ctx))[-1]), progress=progress)


def _frozen(model: ModelSource, newest: Path | None, progress: Progress) -> str:
    """Digest of the names of weights that are not trained, which the Trainer's states lack. Raises
    ResumeRefused if others were frozen before."""
    frozen = hashlib.sha256("\n".join(sorted(model.frozen_base)).encode()).hexdigest()
    if progress.lineage.get("frozen", frozen) != frozen:
        hint = "to freeze others, start a new run from this run's export"
        raise ResumeRefused(f"{newest}: other weights were frozen than now", hint=hint)
    return frozen


def _newest(ctx: Context) -> tuple[Path | None, Progress]:
    """The newest checkpoint that rank 0 finds, and its progress. Raises CheckpointError."""
    found = complete_checkpoints(root(ctx))[-1:] if ctx.dist.is_main else []
    name = ctx.dist.broadcast_str("".join(path.name for path in found))
    if not name:
        return None, Progress()
    newest = root(ctx) / name
    return newest, Progress.from_record(read_json(newest / PROGRESS))


def _arguments(
    config: TrainerFields, ctx: Context, plan: OptimizerPlan, accumulation: int, steps: int
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(root(ctx)),
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
        report_to="none",  # trackers are slots
        **config.arguments,
    )


@dataclass(eq=False)
class MicroBatches:
    """This rank's micro-batches of all steps after `progress`, as one epoch of the Trainer. Every
    step has `accumulation` of them; empty ones, which change no number, fill up short steps."""

    feed: Feed
    data: Data
    axis: DataAxis
    accumulation: int
    progress: Progress
    steps: int
    taken: list[BatchStats] = field(default_factory=list, init=False)
    """Statistics of the micro-batches that were handed out; who reads them clears them."""

    @property
    def dataset(self) -> Any:
        """The training samples; accelerate asks for them."""
        return self.data.train

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[dict[str, Any]]:
        position = self.progress.samples
        for _ in range(self.progress.step, self.steps):
            scale = self.axis.count / self.feed.counts(position)["targets"]
            found = list(self.feed.microbatches(position))
            batches = [batch for batch, _ in found]
            self.taken += [stats for _, stats in found]
            empty = collate([], self.data.pad_id, batches[0].input_ids.device)
            for batch in [*batches, *[empty] * (self.accumulation - len(batches))]:
                # The Trainer estimates the work by the ids.
                yield {"input_ids": batch.input_ids, "batch": batch, "scale": scale}
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

    def save_untrained(self) -> None:
        """Save the state before the first step (collective)."""
        self._save_checkpoint(self.model, None)
        self.callback_handler.on_save(self.args, self.state, self.control)

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
        batch: MicroBatch = placed(model, inputs["batch"])
        parts = judged(CrossEntropy(), ModelScorer(model), batch, batch)
        loss: Tensor = parts.terms["targets"] * inputs["scale"]
        return loss
