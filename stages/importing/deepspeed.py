"""The keys of a DeepSpeed configuration."""

from __future__ import annotations

from typing import Any

from stages.importing import rules
from stages.importing.account import Account
from stages.importing.rules import (
    Auto,
    Rule,
    Table,
    Verdict,
    WrongValueError,
    auto,
    covered,
    never,
    only,
    says,
    switched,
    unless,
)
from stages.importing.zero import ZERO

SKIPPED = "an overflow always skips the step and halves the scale"


def _enabled(dtype: str) -> Rule:
    def rule(value: Any) -> Verdict:
        if value == "auto":
            return Verdict(outcome="translated", fact="compute", value=Auto(default="fp32"))
        if value is None or not rules.truth(value):
            return Verdict(outcome="default", why="is off")
        return Verdict(outcome="translated", fact="compute", value=dtype)

    return rule


def _dynamic(value: Any) -> Verdict:
    if rules.number(value) == 0:
        return Verdict(outcome="default", why="the loss scale is dynamic")
    why = "the loss scale is dynamic"
    return Verdict(outcome="refused", why=why, hint="set loss_scale: 0, and initial_scale_power")


def _scale(power: Any) -> float:
    found = rules.whole(power)
    if not 0 <= found <= 32:
        raise WrongValueError(f"2 to the power of {power!r} is no loss scale to start from")
    return float(2**found)


FP16: Table = {
    "enabled": _enabled("fp16"),
    "loss_scale": _dynamic,
    "initial_scale_power": says("fp16.initial", _scale),
    "loss_scale_window": says("fp16.interval", rules.positive),
    "hysteresis": covered(SKIPPED),
    "consecutive_hysteresis": covered(SKIPPED),
    "min_loss_scale": covered(SKIPPED),
    "auto_cast": covered("inputs are token ids"),
    "fp16_master_weights_and_grads": never("masters below fp32 lose small updates"),
    "fp16_optimizer_states": never("optimizer state has the masters' dtype"),
}
BF16: Table = {
    "enabled": _enabled("bf16"),
    "immediate_grad_update": covered("gradients are summed over the whole step"),
    "check_grad_overflow": covered("a gradient that is not finite ends the run"),
    "bf16_master_weights_and_grads": says(
        "master", lambda value: "bf16" if rules.truth(value) else "fp32"
    ),
    "bf16_optimizer_states": never("optimizer state has the masters' dtype"),
}


SHOWN = "metrics.jsonl has every step, the screen every train.log_every"
MINE = "the checkpoint slot decides how training state is saved"
SHAPE = "a model is cut over data-parallel ranks only"
REMOVED = "DeepSpeed 0.19 has removed it"
DTYPES = {name: name for name in ("fp32", "fp16", "bf16")}


_HINT = "choose another optimizer stage (`pipe stages`)"


def _optimizer_type(value: Any) -> str:
    if str(value).lower() not in ("adam", "adamw"):
        raise WrongValueError(f"{value!r} is not AdamW", _HINT)
    return "adamw"


OPTIMIZER: Table = {
    "type": says("optimizer", _optimizer_type),
    "legacy_fusion": covered("is of no effect"),
    "params": {
        "lr": auto("lr", 5e-5, rules.number),
        "betas": auto("betas", [0.9, 0.999], rules.pair),
        "eps": auto("eps", 1e-8, rules.number),
        "weight_decay": auto("weight_decay", 0.0, rules.number),
        "torch_adam": says("zero.torch_adam", rules.truth),
        "adam_w_mode": only(
            True, why="decay is decoupled", otherwise="weight decay is decoupled", hint=_HINT
        ),
        "bias_correction": only(
            True, why="is always on", otherwise="moments are corrected", hint=_HINT
        ),
        "fused": covered("the optimizer slot chooses the kernel"),
        "amsgrad": never("there is no AMSGrad", _HINT),
        "max_grad_norm": unless((0, 0.0), says("max_grad_norm", rules.number)),
        "freeze_step": never("there is no 1-bit Adam", _HINT),
    },
}

SCHEDULES = {
    "warmuplr": "constant",
    "warmupdecaylr": "linear",
    "warmupcosinelr": "cosine",
}
_LINEAR = "the learning rate rises linearly"
SCHEDULER: Table = {
    "type": says(
        "deepspeed.schedule",
        rules.choice(SCHEDULES, "use WarmupDecayLR or WarmupCosineLR"),
        "warm-up is linear, also where DeepSpeed's is logarithmic",
    ),
    "params": {
        "warmup_min_lr": only(0, 0.0, why="rises from 0", otherwise="warm-up begins at 0"),
        "warmup_max_lr": auto("lr", 5e-5, rules.number),
        "warmup_num_steps": auto("warmup_steps", 0, rules.whole),
        "warmup_type": only(
            "linear", why="is linear", otherwise=_LINEAR, hint="DeepSpeed's log is its default"
        ),
        "warmup_min_ratio": only(0, 0.0, why="rises from 0", otherwise="warm-up begins at 0"),
        "cos_min_ratio": says("final_lr_ratio", rules.number),
        "total_num_steps": auto("schedule_steps", None, rules.positive),
        "last_batch_iteration": only(-1, why="starts anew", otherwise="a schedule starts anew"),
    },
}

AIO: Table = {
    **{
        key: says(f"aio.{key}", rules.positive)
        for key in ("block_size", "queue_depth", "intra_op_parallelism")
    },
    **{
        key: says(f"aio.{key}", rules.truth)
        for key in ("single_submit", "overlap_events", "use_gds")
    },
    "thread_count": says("aio.intra_op_parallelism", rules.positive),
}


def _extra(*names: str) -> dict[str, Rule]:
    return {name: switched(f"extra.{name}") for name in names}


DEEPSPEED: Table = {
    "train_batch_size": auto("global_batch", None, rules.positive),
    "train_micro_batch_size_per_gpu": auto("per_device", 8, rules.positive),
    "gradient_accumulation_steps": auto("accumulation", 1, rules.positive),
    "gradient_clipping": auto("max_grad_norm", 1.0, rules.number),
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
    "fp16": FP16,
    "bf16": BF16,
    "bfloat16": BF16,
    "zero_optimization": ZERO,
    "aio": AIO,
    "communication_data_type": says("reduce", rules.choice(DTYPES)),
    "seq_parallel_communication_data_type": covered("sequences are not cut"),
    "data_types": {
        "grad_accum_dtype": only(
            "fp32", why="gradients are summed in fp32", otherwise="gradients are summed in fp32"
        ),
        "param_dtype": never("the precision slot decides dtypes", "set compute there"),
        "buffer_dtype": says("buffer", rules.choice(DTYPES)),
        "keep_in_fp32_modules": covered("buffers are in precision.buffer's dtype"),
    },
    "torch_autocast": {
        "enabled": only(
            False, why="is off", otherwise="parameters are cast whole, not operator by operator",
            hint="use bf16: {enabled: true}",
        ),
        "dtype": covered("belongs to autocast"),
        "lower_precision_safe_modules": covered("belongs to autocast"),
    },
    "managed_gradient_accumulation": covered("the loop accumulates"),
    "gradient_allreduce_op": only("mean", why="is the mean", otherwise="gradients are averaged"),
    "zero_allow_untested_optimizer": covered("is always allowed"),
    "zero_force_ds_cpu_optimizer": covered("wrap.optimizer_implementation decides"),
    "steps_per_print": covered(SHOWN),
    "activation_checkpointing": covered("belongs to an interface that no model here calls"),
    "checkpoint": covered(MINE),
    "datastates_ckpt": covered(MINE),
    "dataloader_drop_last": covered("the data slot makes the batches"),
    "use_data_before_expert_parallelism": covered("there is no expert parallelism"),
    "data_efficiency": only(
        *({"enabled": False}, {}), why="is off", otherwise="it changes the order of samples",
        hint="leave it out",
    ),
    "autotuning": only(
        *({"enabled": False}, {}), why="is off", otherwise="nothing is tuned", hint="leave it out"
    ),
    "hybrid_engine": only(
        *({"enabled": False}, {}), why="is off", otherwise="nothing is generated while training",
        hint="leave it out",
    ),
    "pipeline": never(SHAPE, blocks=True),
    "tensor_parallel": never(SHAPE, blocks=True),
    "expert_parallel": only({"enabled": False}, why="is off", otherwise=SHAPE, blocks=True),
    "sequence_parallel_size": only(1, why="is 1", otherwise=SHAPE, blocks=True),
    "weight_quantization": never("weights are not quantised", blocks=True),
    "vocabulary_size": covered("is of no effect"),
    **_extra(
        *("prescale_gradients", "disable_allgather", "disable_python_gc", "dump_state"),
        *("log_level", "memory_breakdown", "wall_clock_breakdown", "timers", "compile"),
        *("flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"),
        *("allgather_size",),
    ),
    "gradient_predivide_factor": unless((1, 1.0), switched("extra.gradient_predivide_factor")),
    **{
        key: only(
            *(False, {"enabled": False}, {}), why="is off", otherwise=REMOVED, hint="leave it out"
        )
        for key in (
            *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients"),
            *("eigenvalue", "sparse_attention", "elasticity", "graph_harvesting"),
            *("curriculum_learning", "progressive_layer_drop"),
        )
    },
}  # fmt: skip


def assume_engine(account: Account, *, alone: bool) -> None:
    """What DeepSpeed 0.19 does where its configuration says nothing; `alone`: without the Trainer,
    whose arguments fill in some of it."""
    missing: dict[str, tuple[Any, str]] = {}
    own = "DeepSpeed's default"
    if alone:
        missing["max_grad_norm"] = 0.0, own
    if account.given("optimizer"):
        missing["decay_all"] = True, "DeepSpeed decays every parameter"
        missing["weight_decay"] = 0.0, own
        if alone and not account.given("deepspeed.schedule"):
            missing["schedule"] = "flat", "DeepSpeed has no schedule unless told"
    if account.given("deepspeed.schedule"):
        missing["warmup_steps"] = 1000, own
        if account.value("deepspeed.schedule") == "cosine":
            missing["final_lr_ratio"] = 1e-4, own
    if account.value("compute") == "fp16":
        missing["fp16.interval"] = 1000, own
    for fact, (value, why) in missing.items():
        if not account.given(fact):
            account.assume(fact, value, why)
