"""A run of train.hf_trainer: the Trainer with the recipe's samples, loss and optimizer, and the
record of it: progress, measurements, complete checkpoints."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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
    ResumeRefused,
    StageError,
    StepCallback,
    TrainedRun,
)
from pipeline.checkpoint import address
from pipeline.utils import sync, sync_tree
from stages.batches.feed import BatchStats, Feed, microbatch_ranges
from stages.batches.layout import collate, micro_batch
from stages.formats.stored import PROGRESS, read_json
from stages.hf.accelerate_compat import reset_state
from stages.model.rotary_compat import placed
from stages.objectives.cross_entropy import CrossEntropy, RowLoss, judged, measured
from stages.objectives.scoring import ModelScorer
from stages.train.checks import Done, lineage, require_same_lineage
from stages.train.evaluation import heldout_targets, record_evaluation, set_metric
from stages.train.report import Reporter, step_record
from stages.train.settings import TrainerFields, several_rules
from stages.train.step import advance
from stages.wrap.build import build_module
from stages.wrap.optimizer_state import make_optimizers
from stages.wrap.shards import stored_tensors
from stages.wrap.torch_engine import evaluating


def train(
    config: TrainerFields, ctx: Context, data: Data, plan: OptimizerPlan, precision: Precision,
    model: ModelSource, callback: StepCallback | None,
) -> TrainedRun:  # fmt: skip
    """Train to the last step, from the newest complete checkpoint if there is one (collective).
    Raises CheckpointError, and ResumeRefused for another training's checkpoint."""
    folder, stop = Path(address(ctx.run_dir, None, ctx.training)), ctx.dist.stop
    identity = lineage(config, ctx, data, model)
    found = complete_checkpoints(folder)[-1:] if ctx.dist.is_main else []
    name = ctx.dist.broadcast_str("".join(path.name for path in found))
    newest, progress = folder / name if name else None, Progress()
    if newest is not None:
        progress = Progress.from_record(read_json(newest / PROGRESS), str(newest))
    require_same_lineage(identity, ctx.accept, progress)
    # The Trainer's states lack weights that are not trained, and their names.
    frozen = hashlib.sha256("\n".join(sorted(model.frozen_base)).encode()).hexdigest()
    if progress.lineage.get("frozen", frozen) != frozen:
        hint = "to freeze others, start a new run from this run's export"
        raise ResumeRefused(f"{newest}: other weights were frozen than now", hint=hint)
    progress.lineage = identity | {"frozen": frozen}
    loader = MicroBatches(config, ctx, data, progress, model.vocab_size)
    reporter = Reporter(ctx, log_every=config.log_every, total_steps=loader.feed.total_steps)
    ctx.metrics.rewind(progress.step)
    if newest is not None and progress.step >= loader.steps:
        shortfall = Done.of(config, data, progress).shortfall(ctx.slot)
        reporter.nothing_left(progress.step, loader.steps, shortfall)
        progress.stopped = ""
        return TrainedRun(checkpoint=str(newest), progress=progress)
    trainer = _RecipeTrainer(config, ctx, plan, precision, model, loader, folder)
    callbacks = Callbacks(reporter, callback)
    callbacks.restore(progress.callbacks)
    callbacks.state()  # one that cannot be saved is found before anything is trained
    recorder = Recorder(config, ctx, plan, loader, progress, trainer, reporter, callbacks, folder)
    trainer.add_callback(recorder)
    if recorder.ends_early():
        if newest is None:
            recorder.evaluate()
            trainer._save_checkpoint(trainer.model, None)  # collective
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        checkpoint = newest or complete_checkpoints(folder)[-1]
        return TrainedRun(checkpoint=str(checkpoint), progress=progress)
    with stop.deferred():
        # The Trainer resumes no checkpoint of step 0, whose weights are those that it has.
        trainer.train(resume_from_checkpoint=str(newest) if progress.step else None)
        if recorder.stopped:
            stop.end()
    return TrainedRun(checkpoint=str(complete_checkpoints(folder)[-1]), progress=progress)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were saved completely, so have a progress; oldest first."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{PROGRESS}")]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


class MicroBatches:
    """This rank's micro-batches of all steps after `progress`, as one epoch of the Trainer. Every
    step has `accumulation` of them; empty ones, which change no number, fill up short steps."""

    def __init__(
        self, config: TrainerFields, ctx: Context, data: Data, progress: Progress, vocabulary: int
    ) -> None:
        self.data, self.progress = data, progress
        self.dataset: Any = data.train  # accelerate asks for it
        self.axis = DataAxis(index=ctx.dist.rank, count=ctx.dist.world_size)
        device = ctx.dist.device
        self.feed = Feed(config, data, ctx.seed, self.axis, device, vocabulary=vocabulary)
        ctx.on_exit(self.feed.close)
        self.steps = self.feed.total_steps(progress)
        self.size, batch = config.microbatch_size(self.axis.count), config.global_batch_size
        self.accumulation = len(microbatch_ranges(batch, self.axis, self.size))
        self.taken: list[BatchStats] = []
        """Statistics of the micro-batches that were handed out; who reads them clears them."""

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[dict[str, Any]]:
        position = self.progress.samples
        for _ in range(self.progress.step, self.steps):
            scale = self.axis.count / self.feed.unit_counts(position)["targets"]
            found = list(self.feed.microbatches(position))
            batches = [batch for batch, _ in found]
            self.taken += [stats for _, stats in found]
            empty = collate([], self.data.pad_id, batches[0].input_ids.device)
            for batch in [*batches, *[empty] * (self.accumulation - len(batches))]:
                # The Trainer estimates the work by the ids.
                yield {"input_ids": batch.input_ids, "batch": batch, "scale": scale}
            position += self.feed.samples_in_step(position)


class _RecipeTrainer(Trainer):  # type: ignore[misc]
    """The Trainer with the recipe's samples and loss."""

    loss_is_scaled_for_ga = True

    def __init__(
        self, config: TrainerFields, ctx: Context, plan: OptimizerPlan, precision: Precision,
        model: ModelSource, loader: MicroBatches, folder: Path,
    ) -> None:  # fmt: skip
        """Build the model and its optimizer (collective)."""
        everyone, steps = torch.distributed.group.WORLD, loader.steps
        module = build_module(ctx, model, precision, replicas=everyone, casts=True)
        for message, hint in several_rules(plan.rules):  # which the stage need not declare before
            raise StageError(message, hint=hint)
        ((_, part, optimizer),) = make_optimizers(plan, module)
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=loader.size,
            gradient_accumulation_steps=loader.accumulation,
            max_steps=steps,
            max_grad_norm=plan.max_grad_norm or 0.0,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="steps",
            save_steps=config.save_every or steps,
            save_total_limit=None,  # the recorder removes old ones, once a newer one is complete
            ignore_data_skip=True,  # the loader begins after the progress
            remove_unused_columns=False,
            disable_tqdm=True,
            seed=ctx.seed,
            use_cpu=ctx.dist.device.type == "cpu",
            report_to="none",  # trackers are slots
            **config.arguments,
        )
        # The Trainer asks once more after the last step.
        schedule = LambdaLR(optimizer, lambda step: part.lr_scale(min(step, steps - 1), steps))
        super().__init__(
            model=module, args=arguments, train_dataset=loader.dataset,
            optimizers=(optimizer, schedule),
        )  # fmt: skip
        self._loader, self._frozen_base = loader, frozenset(model.frozen_base)
        if self._frozen_base:  # otherwise a resume reports it as missing
            self.model._keys_to_ignore_on_save = self._frozen_base
        ctx.on_exit(reset_state)
        self.remove_callback(PrinterCallback)

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
        batch: MicroBatch = placed(model, inputs["batch"])
        parts = judged(CrossEntropy(), ModelScorer(model), batch, batch)
        loss: Tensor = parts.terms["targets"] * inputs["scale"]
        return loss


@dataclass(eq=False)
class Recorder(TrainerCallback):  # type: ignore[misc]
    """Keeps the progress, evaluates, calls the step callbacks, and completes checkpoints."""

    config: TrainerFields
    ctx: Context
    plan: OptimizerPlan
    loader: MicroBatches
    progress: Progress
    """The loader's."""
    trainer: Trainer
    reporter: Reporter
    callbacks: Callbacks
    """The reporter among them."""
    folder: Path
    """Folder of the Trainer's checkpoints."""
    stopped: bool = field(default=False, init=False)
    """Whether training ends, saved, because a rank was asked to stop."""

    def _restart(self, *given: Any, **rest: Any) -> None:
        """Leave out of the next step's time all that was before this call."""
        self._since = time.perf_counter()
        self._before = self.progress.tokens, self.progress.samples

    on_train_begin = _restart

    def on_step_begin(self, *given: Any, **rest: Any) -> None:
        self.ctx.dist.heartbeat.beat(Phase.STEP, step=self.progress.step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        advance(self.progress, self.loader.feed)
        stats = BatchStats(*map(sum, zip(*self.loader.taken, strict=True)))
        self.loader.taken.clear()
        sums = torch.tensor([*stats, self.ctx.dist.stop.asked], dtype=torch.float64)
        if self.ctx.dist.world_size > 1:
            torch.distributed.all_reduce(sums)
        *total, stops = sums.tolist()
        self._batch = BatchStats(*total)
        if stops:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **rest: Any) -> None:
        """Record the step; evaluate if it is due."""
        if "loss" not in logs:
            return
        progress, norm, loss = self.progress, float(logs["grad_norm"]), float(logs["loss"])
        if not math.isfinite(norm):
            raise StageError(
                f"step {progress.step}: the gradient norm is {norm}",
                hint="lower the learning rate, or look for broken samples",
            )
        set_metric(progress, "loss", loss)
        seconds, ranks = time.perf_counter() - self._since, self.ctx.dist.world_size
        targets, samples = self._before
        record = step_record(
            progress, self._batch, seconds=seconds, ranks=ranks, shares=ranks, loss=loss,
            trained=(progress.tokens - targets, progress.samples - samples), grad_norm=norm,
            rates=self.plan.rates(self.plan.lr_scales(progress.step - 1, self.loader.steps)),
            when=time.time(),
        )  # fmt: skip
        self.callbacks.on_step(progress.step, progress, record)
        every, last = self.config.eval_every, progress.step == self.loader.steps
        due = last or (every is not None and progress.step % every == 0)
        if due:
            self.evaluate()
        if self.ends_early():
            control.should_save = control.should_training_stop = True
            if not due:
                self.evaluate()
        self._restart()

    def ends_early(self) -> bool:
        """Whether a callback ends the training before its last step (collective)."""
        progress, steps = self.progress, self.loader.steps
        reason = self.callbacks.agree_to_end(self.ctx.dist) if progress.step < steps else ""
        return self.reporter.ends_early(progress, steps, reason)

    def evaluate(self) -> None:
        """Evaluate the weights on the held-out samples, if there are any (collective)."""
        data, loader, device = self.loader.data, self.loader, self.ctx.dist.device
        if data.heldout is None:
            return
        model = self.trainer.model_wrapped
        measure, scorer = RowLoss(), ModelScorer(model)
        summed = torch.zeros((), dtype=torch.float64, device=device)
        with torch.no_grad(), evaluating([model]):
            for start, end in microbatch_ranges(len(data.heldout), loader.axis, loader.size):
                given = range(start, end), 0, device, loader.feed.vocabulary
                batch = placed(model, micro_batch(data, data.heldout, *given)[0])
                summed += measured(measure, scorer, batch, batch).sum()
        if self.ctx.dist.world_size > 1:
            torch.distributed.all_reduce(summed)
        record = record_evaluation(self.progress, float(summed) / heldout_targets(data), None)
        self.callbacks.on_evaluation(self.progress.step, self.progress, record)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Mark the checkpoint as complete, then remove those that need not be kept."""
        self.progress.callbacks = self.callbacks.state()
        self.ctx.dist.barrier()  # every rank has written its random state
        if self.ctx.dist.is_main:
            newest = self.folder / f"checkpoint-{state.global_step}"
            sync_tree(newest)
            (newest / PROGRESS).write_text(json.dumps(vars(self.progress), indent=1), "utf-8")
            sync(newest / PROGRESS)
            keep = self.config.keep
            for old in [] if keep is None else complete_checkpoints(self.folder)[:-keep]:
                (old / PROGRESS).unlink()
                shutil.rmtree(old)
        self.ctx.dist.barrier()
        self._restart()
