"""The live side of train.hf_trainer."""

from __future__ import annotations

import functools
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from pipeline.contracts.data import Data
from pipeline.contracts.engine import DataAxis
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.precision import Precision
from pipeline.contracts.stage import Context
from pipeline.contracts.training import Progress, TrainedRun
from stages.train.batches import microbatches
from stages.train.evaluation import mean_loss
from stages.train.feed import Feed
from stages.train.hf_trainer_callback import (
    MicroBatches,
    Recorder,
    micro_batch,
    read_progress,
    whole_checkpoints,
)
from stages.train.lineage import lineage, require_same_lineage
from stages.train.loss import SummedLoss
from stages.wrap.accelerate_compat import reset_state
from stages.wrap.build import build_module, named_parameters
from stages.wrap.load_weights import stored_tensors

if TYPE_CHECKING:
    from stages.train.hf_trainer import HfTrainer


def train(
    config: HfTrainer,
    ctx: Context,
    data: Data,
    plan: OptimizerPlan,
    precision: Precision,
    model: ModelSource,
) -> TrainedRun:
    """Train to the last step from wherever the newest whole checkpoint left off (collective)."""
    root = ctx.run_dir / "checkpoints"
    batches = config.batches()
    shard = DataAxis(index=ctx.dist.rank, count=ctx.dist.world_size)
    began = lineage(batches, ctx, data, model)
    newest, progress = _newest(root, ctx)
    require_same_lineage(began, ctx.accept, progress)
    progress.lineage = began
    feed = Feed(batches, data, ctx.seed, shard, ctx.dist.device)
    ctx.on_exit(feed.close)
    steps = feed.total_steps(progress)
    if newest is not None and progress.step >= steps:
        ctx.log.info("nothing left to train: step %d of %d", progress.step, steps)
        return TrainedRun(checkpoint=str(newest), progress=progress)
    micro = batches.microbatch_size(shard.count)
    accumulation = len(microbatches(config.global_batch_size, shard, micro))
    everyone = torch.distributed.group.WORLD
    module = build_module(ctx, model, precision, replicas=everyone, casts=True)
    trainer = _RecipeTrainer(
        model=module,
        args=_arguments(config, ctx, plan, root, micro, accumulation, steps),
        train_dataset=data.train,
        loader=MicroBatches(feed, data, shard, accumulation, progress),
        plan=plan,
        frozen_base=frozenset(model.frozen_base),
    )
    ctx.on_exit(reset_state)
    trainer.remove_callback(PrinterCallback)
    due = functools.partial(_evaluation, config, ctx, data, trainer, shard, steps)
    trainer.add_callback(
        Recorder(
            ctx,
            feed,
            progress,
            root,
            steps,
            log_every=config.log_every,
            keep=config.keep,
            evaluate=due,
        )
    )
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    return TrainedRun(checkpoint=str(whole_checkpoints(root)[-1]), progress=progress)


def _newest(root: Path, ctx: Context) -> tuple[Path | None, Progress]:
    """Rank 0's choice, on every rank."""
    found = whole_checkpoints(root)[-1:] if ctx.dist.is_main else []
    name = ctx.dist.broadcast_str(
        "".join(path.name for path in found) if ctx.dist.is_main else None
    )
    if not name:
        return None, Progress()
    return root / name, read_progress(root / name)


def _arguments(
    config: HfTrainer,
    ctx: Context,
    plan: OptimizerPlan,
    root: Path,
    micro: int,
    accumulation: int,
    steps: int,
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(root),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        max_grad_norm=plan.max_grad_norm or 0.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=config.save_every or steps,
        save_total_limit=None,  # the recorder removes old ones, once a newer one is whole
        ignore_data_skip=True,  # the loader knows where to go on
        remove_unused_columns=False,
        disable_tqdm=True,
        seed=ctx.seed,
        use_cpu=ctx.dist.device.type == "cpu",
        **{"report_to": "none", **config.arguments},
    )


def _evaluation(
    config: HfTrainer,
    ctx: Context,
    data: Data,
    trainer: _RecipeTrainer,
    shard: DataAxis,
    last: int,
    step: int,
) -> float | None:
    """Mean held-out loss in nats after `step`, if it is due (collective)."""
    due = step == last or (config.eval_every is not None and step % config.eval_every == 0)
    if data.heldout is None or not due:
        return None
    model, size = trainer.model_wrapped, config.batches().microbatch_size(shard.count)
    model.eval()
    mean = mean_loss(SummedLoss(model), data, data.heldout, shard, ctx.dist.device, size)
    model.train()
    return mean


class _RecipeTrainer(Trainer):  # type: ignore[misc]
    """The Trainer with the recipe's samples, loss, optimizer and learning rates."""

    loss_is_scaled_for_ga = True
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, *, loader: MicroBatches, plan: OptimizerPlan, frozen_base: Set[str], **rest: Any
    ) -> None:
        super().__init__(**rest)
        self._loader = loader
        self._plan = plan
        self._borrowed = frozen_base
        if frozen_base:  # which it would miss when it resumes
            self.model._keys_to_ignore_on_save = frozen_base

    def get_train_dataloader(self) -> MicroBatches:
        return self._loader

    def _save(self, output_dir: str, state_dict: dict[str, Tensor] | None = None) -> None:
        """Leave out what is frozen_base, and then also the description of the whole model."""
        if not self._borrowed:
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            tensors = stored_tensors(self.model)
            own = {name: one.detach() for name, one in tensors if name not in self._borrowed}
            save_file(own, Path(output_dir) / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def get_batch_samples(self, *arguments: Any) -> tuple[list[Any], None]:
        # The scale of the loss comes with each micro-batch, so nothing is counted or gathered.
        batches, _ = super().get_batch_samples(*arguments)
        return batches, None

    def _get_num_items_in_batch(self, *arguments: Any) -> None:
        return None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self._plan.build(self._plan.groups(named_parameters(self.model)))
        made: torch.optim.Optimizer = self.optimizer
        return made

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer,
                # It is asked once more behind the last step.
                lambda step: self._plan.lr_scale(
                    min(step, num_training_steps - 1), num_training_steps
                ),
            )
        return self.lr_scheduler

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *rest: Any, **named: Any
    ) -> Tensor:
        """The sum over this micro-batch's target tokens, over the mean number of a rank's in the
        step: averaged over ranks, the mean over all target tokens of the step."""
        loss: Tensor = SummedLoss(model)(micro_batch(inputs)) * inputs["scale"]
        return loss
