"""The keys of an axolotl recipe that say what is trained, and how."""

from __future__ import annotations

from typing import Any

from stages.importing import rules
from stages.importing.common import (
    LORA_PLUS,
    each_epoch,
    held_out,
    named_template,
    new_tokens,
    template_setting,
)
from stages.importing.engines import FP8, FSDP_PREFIXED, optimizer_rule
from stages.importing.rules import RuleResult, Table, allowed, each_way, sets, when_on
from stages.importing.trackers import MLFLOW, WANDB_PREFIXED, text
from stages.importing.trainer import OPTIMIZERS, SCRIPT, TRAINER

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4",
             "flex_attention")  # fmt: skip
FLAGS = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
}
"""Earlier keys for attention -> implementation."""
_KERNELS = {**OPTIMIZERS, "ao_adamw_8bit": {"moments": "8bit"}}
_CHECKPOINTING = "model.activation_checkpointing"
_recompute = when_on(_CHECKPOINTING, {})
_offload = sets(f"{_CHECKPOINTING}.offload", lambda _: True, off=(False,))
_config = rules.unsupported("the model is as its config says", "change the model's config.json")
_other_kernel = rules.unsupported("recipes do not have this kernel", "set attn_implementation")


def attention(value: Any) -> str:
    """Return an implementation that a recipe has, or a kernel of the hub."""
    found = str(value)
    if "/" not in found:
        rules.choice(ATTENTION, "use flash_attention_2 or sdpa")(found)
    return found


def _checkpointing(value: Any) -> RuleResult:
    return _offload(value) if str(value).startswith("offload") else _recompute(value)


def _selective(value: Any) -> RuleResult:
    if value in (True, {"save": ["attention"]}):
        return sets(f"{_CHECKPOINTING}.keep", lambda _: "attention")(value)
    return rules.untranslated(f"{_CHECKPOINTING} has other choices")(value)


def _bf16(value: Any) -> RuleResult:
    """Read `auto` and `full` as on: recipes do not look at the GPU, and have no autocast."""
    return when_on("precision.compute", "bf16")(True if value in ("auto", "full") else value)


def _compile(value: Any) -> RuleResult:
    return when_on("model.compile", {})(True if value == "auto" else value)


def _model_class(value: Any) -> RuleResult:
    if str(value).endswith("ForCausalLM"):
        return RuleResult(outcome="default", why="every model is a causal language model")
    return rules.refused("recipes train causal language models", blocks=True)


MODEL: Table = {
    **dict.fromkeys(("base_model", "base_model_config"), SCRIPT["model_name_or_path"]),
    **dict.fromkeys(("model_revision", "revision_of_model"), SCRIPT["model_revision"]),
    "tokenizer_config": SCRIPT["tokenizer_name"],
    **dict.fromkeys(("model_type", "type_of_model"), _model_class),
    "trust_remote_code": SCRIPT["trust_remote_code"],
    "reinit_weights": when_on("model.init", "random"),
    **each_way("model_config overrides_of_model_config model_kwargs overrides_of_model_kwargs "
               "rope_scaling model_quantization_config", _config),
    "special_tokens": {"pad_token": rules.passes(), **each_way(
        "bos_token eos_token unk_token additional_special_tokens", new_tokens)},
    **each_way("tokens added_tokens_overrides resize_token_embeddings_to_32x shrink_embeddings "
               "fix_untrained_tokens tokenizer_use_mistral_common", new_tokens),
    "attn_implementation": sets("model.attention", attention),
    **{flag: when_on("model.attention", name) for flag, name in FLAGS.items()},
    **each_way("xformers_attention sage_attention", _other_kernel),
    "gradient_checkpointing": _checkpointing,
    "activation_offloading": _offload,
    "selective_checkpointing": _selective,
    **each_way("liger_rope liger_rms_norm liger_layer_norm liger_glu_activation",
               when_on("model.kernels", "liger")),
}  # fmt: skip

ADAPTER: Table = {
    "adapter": sets(
        "adapter",
        rules.choice({"lora": True, "qlora": True}, "use lora or qlora", blocks=True),
        off=("",),
    ),
    **{key: SCRIPT[key] for key in SCRIPT if key.startswith("lora_") and key != "lora_task_type"},
    "lora_target_linear": when_on("adapter.targets", "all-linear"),
    "lora_fan_in_fan_out": allowed(False),
    "lora_model_dir": sets("adapter.start_from", rules.path, off=("",)),
    "peft_use_rslora": SCRIPT["use_rslora"],
    "peft_use_dora": SCRIPT["use_dora"],
    **each_way("peft_init_lora_weights peft_autocast_adapter_dtype", allowed(True)),
    "load_in_4bit": SCRIPT["load_in_4bit"],
    "load_in_8bit": SCRIPT["load_in_8bit"],
    "bnb_config_kwargs": {
        key: SCRIPT[key] for key in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    },
    **LORA_PLUS,
}

DATA: Table = {
    "sequence_len": SCRIPT["max_length"],
    "excess_length_strategy": sets(
        "data.too_long",
        rules.choice({"drop": "drop", "truncate": "truncate", "raise": "error"}),
    ),
    "sample_packing": SCRIPT["packing"],
    "pretrain_multipack_attn": sets("apart", rules.truth),
    "train_on_inputs": when_on("data.loss", "all"),
    "val_set_size": held_out,
    "curriculum_sampling": sets("train.shuffle", lambda value: not rules.truth(value)),
    "group_by_length": rules.unsupported("order is random, or the order of the files"),
    "chat_template": named_template,
    **each_way(
        "chat_template_jinja chat_template_kwargs eot_tokens default_system_message",
        template_setting,
    ),
    **each_way(
        "dataset_exact_deduplication dataset_shard_num dataset_shard_idx min_sample_len "
        "skip_prepare_dataset",
        rules.unsupported("rows are taken as the files have them", "change the files"),
    ),
}

TRAINING: Table = {
    **{key: rule for key, rule in TRAINER.items()
       if key not in ("optim", "push_to_hub", "num_train_epochs", "per_device_train_batch_size")},
    **{key: SCRIPT[key] for key in ("warmup_ratio", "evaluation_strategy")},
    "micro_batch_size": TRAINER["per_device_train_batch_size"],
    "torch_compile": _compile,
    "batch_size": rules.unsupported(
        "is the product of others", "write micro_batch_size and gradient_accumulation_steps"),
    "auto_find_batch_size": rules.unsupported("a recipe's batch is fixed"),
    "num_epochs": TRAINER["num_train_epochs"],
    "optimizer": optimizer_rule("optim", _KERNELS),
    "lr_scheduler": TRAINER["lr_scheduler_type"],
    "cosine_min_lr_ratio": sets("optimizer.final_lr_ratio", rules.number),
    **dict.fromkeys(("bf16", "bfloat16"), _bf16),
    "float16": TRAINER["fp16"],
    "float32": when_on("precision.compute", "fp32"),
    "tf32": TRAINER["tf32"],
    "fp8": when_on("model.fp8", {}),
    "fp8_config": {"recipe": sets("model.fp8.recipe", str)},
    "fp8_enable_fsdp_float8_all_gather": rules.unsupported("parameters are sent as they are", FP8),
    "early_stopping_patience": sets("train.early_stopping.patience", rules.positive),
    "loss_watchdog_threshold": rules.unsupported(
        "a run ends at a loss that is not finite, or at a spike", "set train.anomalies"),
    "loss_watchdog_patience": rules.follows("loss_watchdog_threshold"),
    "saves_per_epoch": each_epoch("save_part"),
    "evals_per_epoch": each_epoch("eval_part"),
    "hub_model_id": TRAINER["push_to_hub"],
    "fsdp": TRAINER["fsdp"],
    "fsdp_version": FSDP_PREFIXED["version"],
    "fsdp_config": {
        **FSDP_PREFIXED,
        "cpu_offload_pin_memory": sets("fsdp.pin_memory", rules.truth),
        "final_state_dict_type": rules.passes(),
    },
    **dict.fromkeys(("context_parallel_size", "sequence_parallel_degree"),
                    sets("axolotl.context", rules.positive, off=(0,))),
    "tensor_parallel_size": sets("axolotl.tensor", rules.positive, off=(0,)),
    "dp_shard_size": sets("parallel.shard", rules.positive),
    "dp_replicate_size": sets("parallel.replicate", rules.positive),
}  # fmt: skip

TRACKING: Table = {
    **{f"use_{name}": when_on(f"{name}.use", True)
       for name in ("wandb", "tensorboard", "mlflow", "trackio")},
    **WANDB_PREFIXED,
    **MLFLOW,
    "trackio_project_name": text("trackio.project"),
    "trackio_run_name": text("trackio.name"),
}  # fmt: skip
SWITCHES = {
    "wandb_project": "wandb.use", "mlflow_experiment_name": "mlflow.use",
    "trackio_project_name": "trackio.use",
}  # fmt: skip
"""Keys that switch their tracker on."""
