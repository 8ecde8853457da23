"""The keys of a torchtune recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.importing import rules
from stages.importing.common import named_template
from stages.importing.engines import FSDP, max_norm, optimizer_rule, read_betas
from stages.importing.rules import (
    Rule,
    RuleResult,
    Table,
    allowed,
    each_way,
    refused,
    sets,
    unsupported,
    when_on,
)
from stages.importing.tools import COMPONENT
from stages.importing.trainer import SCRIPT, TRAINER

_EIGHT_BITS = ("bitsandbytes.optim.adamw8bit", "bitsandbytes.optim.pagedadamw8bit",
               "torchao.optim.adamw8bit", "torchao.prototype.low_bit_optim.adamw8bit")  # fmt: skip
OPTIMIZERS: Mapping[str, dict[str, str]] = {
    "torch.optim.adamw": {},
    "bitsandbytes.optim.adamw": {},
    "bitsandbytes.optim.pagedadamw": {},
    **{name: {"moments": "8bit"} for name in _EIGHT_BITS},
}
"""Name in lower case -> fields of optimizer.adamw."""
COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
SCHEDULES = {COSINE: "cosine"}
LOSSES = ("torchtune.modules.loss.cewithchunkedoutputloss",
          "torchtune.modules.loss.linearcrossentropyloss", "torch.nn.crossentropyloss")  # fmt: skip
CHECKPOINTERS = ("torchtune.training.fullmodelhfcheckpointer",)
DTYPES = ("fp32", "bf16", "fp16")
COLLATORS = ("torchtune.data.padded_collate_sft", "torchtune.data.padded_collate_packed")
_CHECKPOINTING = "model.activation_checkpointing"
_other = unsupported("no recipe trains like this", blocks=True)
_speed = rules.passes("changes speed or memory, no number")


def known(names: tuple[str, ...], why: str, hint: str, *, blocks: bool = True) -> Rule:
    """Return a rule for components that need no place in a recipe; others are refused."""
    return lambda value: (
        RuleResult(outcome="default", why="every recipe does so")
        if str(value).lower() in names
        else refused(why, hint, blocks=blocks)
    )


def _compile(value: Any) -> RuleResult:
    on = value.get("model", True) if isinstance(value, Mapping) else value
    return when_on("model.compile", {})(on)


def _recomputed(value: Any) -> RuleResult:
    if str(value).isdigit():
        return sets(f"{_CHECKPOINTING}.every", rules.positive)(value)
    return rules.untranslated(f"{_CHECKPOINTING} has other choices")(value)


def _replicas(value: Any) -> int | None:
    return None if value == -1 else rules.positive(value)


TOKENIZER: Table = {
    "max_seq_len": SCRIPT["max_length"],
    "prompt_template": named_template,
    **each_way(f"{COMPONENT} path merges_file merges_path vocab_path special_tokens_path "
               "special_tokens",
               rules.passes("the tokenizer comes from the model's folder")),
}  # fmt: skip
CHECKPOINTER: Table = {
    COMPONENT: known(CHECKPOINTERS, "model.hf reads the layout of Hugging Face",
                     "name a folder with config.json and safetensors in model.path", blocks=False),
    "checkpoint_dir": sets("model", rules.path),
    **dict.fromkeys(("recipe_checkpoint", "adapter_checkpoint", "should_load_recipe_state"),
                    TRAINER["resume_from_checkpoint"]),
    **each_way("checkpoint_files output_dir model_type safe_serialization keep_last_n_checkpoints",
               rules.passes("the model's folder says it, or the run's")),
}  # fmt: skip
OPTIMIZER: Table = {
    COMPONENT: optimizer_rule("optim", OPTIMIZERS),
    "lr": sets("optimizer.lr", rules.number),
    "weight_decay": sets("optimizer.weight_decay", rules.number),
    "betas": sets("betas", read_betas),
    "eps": sets("optimizer.eps", rules.number),
    **each_way("fused foreach capturable block_wise min_8bit_size percentile_clipping",
               _speed),
    "amsgrad": allowed(False),
}  # fmt: skip
SCHEDULER: Table = {
    COMPONENT: sets("schedule", rules.choice(SCHEDULES, "set optimizer.schedule")),
    "num_warmup_steps": sets("warmup_steps", rules.whole),
    "num_cycles": allowed(0.5),
}
LOSS: Table = {
    COMPONENT: known(LOSSES, "the loss is the mean cross-entropy of the target tokens",
                     "use CEWithChunkedOutputLoss"),
    "num_output_chunks": _speed,
    "ignore_index": allowed(-100),
}  # fmt: skip

TOP: Table = {
    "output_dir": sets("output_name", rules.recipe_name),
    "resume_from_checkpoint": TRAINER["resume_from_checkpoint"],
    "save_adapter_weights_only": when_on("export.adapter", True),
    "seed": sets("seed", rules.whole),
    "shuffle": sets("train.shuffle", rules.truth),
    "batch_size": TRAINER["per_device_train_batch_size"],
    "gradient_accumulation_steps": TRAINER["gradient_accumulation_steps"],
    "epochs": TRAINER["num_train_epochs"],
    "max_steps_per_epoch": sets("cap", rules.positive, off=(-1,)),
    "clip_grad_norm": sets("optimizer.max_grad_norm", max_norm),
    "compile": _compile,
    "optimizer_in_bwd": _speed,
    "log_every_n_steps": TRAINER["logging_steps"],
    "run_val_every_n_steps": sets("train.eval_every", rules.positive),
    "device": sets("launch.device", rules.choice(("cpu",)), off=("cuda",)),
    "dtype": sets("precision.compute", rules.choice(DTYPES, "use bf16", blocks=True)),
    "enable_activation_checkpointing": when_on(_CHECKPOINTING, {}),
    "enable_activation_offloading": when_on(f"{_CHECKPOINTING}.offload", True),
    "ac_mode": allowed("full", "selective"),
    "ac_option": _recomputed,
    "fsdp_cpu_offload": sets("fsdp.cpu_offload", rules.truth),
    "fsdp": {"cpu_offload": sets("fsdp.cpu_offload", rules.truth)},
    "fsdp_reshard_after_forward": FSDP["reshard_after_forward"],
    "tensor_parallel_dim": sets("parallel.tensor", rules.positive),
    "tensor_parallel_plan": rules.passes("layers are divided by the architecture's plan"),
    "context_parallel_dim": sets("parallel.context", rules.positive),
    "data_parallel_replicate_dim": sets("parallel.replicate", rules.positive),
    "data_parallel_shard_dim": sets("parallel.shard", _replicas, off=(-1,)),
    "collate_fn": known(COLLATORS, "samples are put together by data.chat and data.text",
                        "leave it out"),
    "tokenizer": TOKENIZER,
    "checkpointer": CHECKPOINTER,
    "optimizer": OPTIMIZER,
    "lr_scheduler": SCHEDULER,
    "loss": LOSS,
    "metric_logger": {},  # loggers.py
    "profiler": rules.untranslated("train.profile_steps names steps to record"),
    **each_way("custom_sharded_layers low_cpu_ram memory_efficient_fsdp_wrap "
               "cudnn_deterministic_mode enable_async_checkpointing log_peak_memory_stats "
               "log_level use_distributed_state_dict batch_size_val", _speed),
    **each_way("quantizer fake_quant_after_n_steps teacher_model teacher_checkpointer kd_ratio "
               "kd_loss ref_checkpointer ref_policy_checkpointer policy_model reward_checkpointer "
               "reward_and_value_model value_checkpointer ppo_epochs ppo_batch_size", _other),
}  # fmt: skip
