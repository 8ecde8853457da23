"""The fields of transformers' TrainingArguments that say something of a training."""

from __future__ import annotations

from typing import Any

from stages.importing import rules
from stages.importing.accelerate import FSDP_PREFIXED, device
from stages.importing.rules import (
    Rule,
    Table,
    Verdict,
    WrongValueError,
    covered,
    never,
    only,
    says,
    switched,
    unless,
)

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "flat",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
"""`flat` is constant from the first step on, whatever the warm-up says."""
_EIGHT_BITS = {"use": "optimizer.adamw", "moments": "8bit"}
_LION = {"use": "optimizer.lion"}
OPTIMIZERS: dict[str, dict[str, str]] = {
    "adamw_torch": {"use": "optimizer.adamw", "kernel": "foreach"},
    "adamw_torch_fused": {"use": "optimizer.adamw", "kernel": "fused"},
    "adamw_torch_8bit": _EIGHT_BITS,
    "adamw_8bit": _EIGHT_BITS,
    "adamw_bnb_8bit": _EIGHT_BITS,
    "paged_adamw_8bit": _EIGHT_BITS,
    "paged_adamw_32bit": {"use": "optimizer.adamw"},
    "lion_32bit": _LION,
    "paged_lion_32bit": _LION,
}
"""Fields of the optimizer slot."""
_PAGED = (
    "is not paged: wrap.zero's offload_optimizer and wrap.fsdp's cpu_offload keep it on the host"
)
_OPTIMIZERS = "choose another optimizer stage (`pipe stages`)"
_SCHEDULES = "use linear, cosine or constant_with_warmup"
STEPS = {"no": "no", "steps": "steps", "epoch": "epoch"}

DEFAULTS: dict[str, Any] = {
    "per_device": 8,
    "accumulation": 1,
    "epochs": 3.0,
    "lr": 5e-5,
    "schedule": "linear",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "seed": 42,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
}
"""Facts that hold where a file of TrainingArguments says nothing, and would not hold here."""


def _flag(fact: str, true: Any, why: str) -> Rule:
    """A flag that says something only when it is set."""

    def rule(value: Any) -> Verdict:
        if value is None or not rules.truth(value):
            return Verdict(outcome="default", why=why)
        return Verdict(outcome="translated", fact=fact, value=true)

    return rule


def _warmup(value: Any) -> Verdict:
    steps = rules.number(value)
    if 0 < steps < 1:
        return Verdict(outcome="translated", fact="warmup_ratio", value=steps)
    return says("warmup_steps", rules.whole)(value)


def _optim(value: Any) -> Verdict:
    paged = str(value).lower().startswith("paged")
    return says("optim", rules.choice(OPTIMIZERS, _OPTIMIZERS), _PAGED if paged else "")(value)


def _every(fact: str) -> Rule:
    def steps(value: Any) -> int:
        found = rules.number(value)
        if 0 < found < 1:
            raise WrongValueError("a fraction of the training", "give a number of steps")
        return rules.positive(value)

    return says(fact, steps)


def _fsdp(value: Any) -> str:
    """`fsdp: true`, or the older `full_shard auto_wrap offload`."""
    if value is True:
        return "wrap.fsdp"
    words = value if isinstance(value, list) else str(value).lower().split()
    unknown = {*words} - {"full_shard", "auto_wrap"}
    if unknown:
        raise WrongValueError(
            f"{value!r} is an old way to say it", "say it in fsdp_config, and fsdp: true"
        )
    return "wrap.fsdp"


_recompute = switched("recompute")
_of_recompute = covered("belongs to activation_checkpointing")

TRAINER: Table = {
    "output_dir": says("output_name", rules.recipe_name, "runs are made below runs/ (--runs)"),
    "run_name": says("name", rules.recipe_name),
    "per_device_train_batch_size": says("per_device", rules.positive),
    "gradient_accumulation_steps": says("accumulation", rules.positive),
    "num_train_epochs": says("epochs", rules.number),
    "max_steps": unless((-1, 0), says("steps", rules.positive), "epochs count"),
    "learning_rate": says("lr", rules.number),
    "lr_scheduler_type": says("schedule", rules.choice(SCHEDULES, _SCHEDULES)),
    "lr_scheduler_kwargs": {
        "min_lr_rate": says("final_lr_ratio", rules.number),
        "min_lr": says("final_lr", rules.number),
        "lr_end": says("final_lr", rules.number),
        "power": says("power", rules.number),
        "num_decay_steps": says("decay_steps", rules.positive),
        "num_stable_steps": never(
            "the rate falls in the last steps of the training", "leave it out"
        ),
        "decay_type": says(
            "decay_shape", rules.choice({"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"})
        ),
        "warmup_type": only("linear", why="is so", otherwise="warm-up is linear"),
        "min_lr_ratio": says("wsd.final_lr_ratio", rules.number),
        "num_cycles": only(0.5, why="is half a cosine", otherwise="a schedule is half a cosine"),
    },
    "warmup_steps": _warmup,
    "optim": _optim,
    "optim_args": never("the optimizer slot has its own fields"),
    "optim_target_modules": never("one rule updates all parameters", _OPTIMIZERS),
    "weight_decay": says("weight_decay", rules.number),
    "adam_beta1": says("beta1", rules.number),
    "adam_beta2": says("beta2", rules.number),
    "adam_epsilon": says("eps", rules.number),
    "max_grad_norm": says("max_grad_norm", rules.number),
    "average_tokens_across_devices": only(
        True, why="is always so", otherwise="the loss is always a mean over the tokens of all ranks"
    ),
    "label_smoothing_factor": only(0, 0.0, why="is off", otherwise="labels are not smoothed"),
    "bf16": _flag("compute", "bf16", "is off"),
    "fp16": _flag("compute", "fp16", "is off"),
    "use_cpu": says("device", device),
    "seed": says("seed", rules.whole),
    "data_seed": says("data_seed", rules.whole),
    "activation_checkpointing": _recompute,
    "activation_checkpointing_kwargs": _of_recompute,
    "gradient_checkpointing": _recompute,
    "gradient_checkpointing_kwargs": _of_recompute,
    "logging_steps": _every("log_every"),
    "eval_strategy": says("eval_strategy", rules.choice(STEPS)),
    "eval_steps": _every("eval_steps"),
    "save_strategy": says("save_strategy", rules.choice({**STEPS, "best": "best"})),
    "save_steps": _every("save_steps"),
    "save_total_limit": says("keep", rules.positive),
    "load_best_model_at_end": _flag("keep_best", 1, "the newest weights are exported"),
    "metric_for_best_model": only(
        *("loss", "eval_loss"),
        why="is the held-out loss",
        otherwise="the best is the lowest eval_loss",
    ),
    "greater_is_better": only(False, why="is so", otherwise="the best is the lowest eval_loss"),
    "dataloader_num_workers": says("workers", rules.whole),
    "dataloader_drop_last": only(
        False, why="is off", otherwise="every sample is trained on", hint="leave it out"
    ),
    "train_sampling_strategy": says(
        "shuffle", rules.choice({"random": True, "sequential": False}, "use random")
    ),
    "ddp_bucket_cap_mb": says("ddp.bucket_cap_mb", rules.positive),
    "ddp_find_unused_parameters": says("ddp.find_unused_parameters", rules.truth),
    "ddp_static_graph": says("ddp.static_graph", rules.truth),
    "fsdp": unless((False, "", []), says("strategy", _fsdp)),
    "fsdp_config": FSDP_PREFIXED,
    "deepspeed": unless(("",), covered("is read as a file of its own")),
    "parallelism_config": never(
        "a model is cut over data-parallel ranks only", "use fsdp", blocks=True
    ),
    "push_to_hub": _flag("publish", True, "nothing is published"),
    "hub_model_id": says("publish.repo", rules.text),
    "hub_private_repo": says("publish.private", rules.truth),
    "hub_revision": says("publish.revision", rules.text),
    "hub_token": unless(
        ("<hub_token>",), never("secrets do not belong into a recipe", "set HF_TOKEN")
    ),
}
