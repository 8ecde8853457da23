"""The keys of a LLaMA-Factory recipe that say what is trained, and how."""

from __future__ import annotations

from typing import Any

from stages.importing import rules
from stages.importing.common import (
    LORA_PLUS,
    held_out,
    named_template,
    new_tokens,
    template_setting,
)
from stages.importing.rules import RuleResult, Table, allowed, each_way, refused, sets, when_on
from stages.importing.trainer import SCRIPT, TRAINER

ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2",
             "fa3": "flash_attention_3"}  # fmt: skip
_config = rules.unsupported("the model is as its config says", "change the model's config.json")
_whole = rules.unsupported("rows are taken as the files have them", "change the files")
_upcast = rules.unsupported("one dtype computes the whole model", "set precision.compute")


def _stage(value: Any) -> RuleResult:
    if value in ("pt", "sft"):
        return RuleResult(outcome="default", why="data.chat or data.text trains so")
    why = f"{value!r} trains on preferences or rewards, which is not supported by recipes"
    return refused(why, "use stage: sft or pt, or train with TRL", blocks=True)


def _method(value: Any) -> RuleResult:
    if value in ("lora", "full"):
        return sets("adapter", lambda name: name == "lora")(value)
    return refused(f"no recipe trains by {value!r}", "use lora or full", blocks=True)


def _bits(value: Any) -> RuleResult:
    if str(value) == "4":
        return when_on("quantize", True)(True)
    why = "weights are held whole or in 4 bits"
    return rules.unset() if value is None else refused(why, "set quantization_bit: 4")


def _targets(value: Any) -> list[str] | str:
    found = rules.names(value)
    return "all-linear" if found == ["all"] else found


def _also(value: Any) -> list[str]:
    return [f"*{name}.*" for name in rules.names(value)]


def _adapter_folder(value: Any) -> str:
    if len(rules.names(value)) != 1:
        raise rules.WrongValueError("merges several adapters", "merge them first", blocks=True)
    return rules.path(value)


MODEL: Table = {
    "adapter_name_or_path": sets("adapter.start_from", _adapter_folder),
    "flash_attn": sets("model.attention", rules.choice(ATTENTION), off=("auto",)),
    "enable_liger_kernel": TRAINER["use_liger_kernel"],
    "disable_gradient_checkpointing": rules.passes("model.activation_checkpointing says it"),
    "create_new_adapter": rules.unsupported(
        "merges the adapter that it is given", "merge it first", blocks=True
    ),
    "use_unsloth_gc": when_on("model.activation_checkpointing.offload", True),
    "train_from_scratch": when_on("model.init", "random"),
    "moe_aux_loss_coef": sets("train.router_loss", rules.number),
    **dict.fromkeys(("upcast_layernorm", "upcast_lmhead_output"), _upcast),
    "rope_scaling": _config,
    **each_way(
        "resize_vocab add_tokens add_special_tokens new_special_tokens_config split_special_tokens",
        new_tokens,
    ),
    "init_special_tokens": rules.follows("add_special_tokens"),
    "quantization_bit": _bits,
    "quantization_type": SCRIPT["bnb_4bit_quant_type"],
    "quantization_method": allowed("bnb", "bitsandbytes", blocks=True),
    "double_quantization": SCRIPT["bnb_4bit_use_double_quant"],
    "quantization_device_map": rules.follows("quantization_bit"),
}

METHOD: Table = {
    "stage": _stage,
    "finetuning_type": _method,
    "pure_bf16": when_on("precision.master", "bf16"),
    "lora_rank": SCRIPT["lora_r"],
    "lora_alpha": SCRIPT["lora_alpha"],
    "lora_dropout": SCRIPT["lora_dropout"],
    "lora_target": sets("adapter.targets", _targets),
    "additional_target": sets("adapter.train_also", _also),
    **{key: SCRIPT[key] for key in ("use_rslora", "use_dora")},
    "early_stopping_steps": sets("train.early_stopping.patience", rules.positive),
    "disable_shuffling": when_on("train.shuffle", False),
    "fp8": when_on("model.fp8", {}),
    "fp8_backend": allowed("torchao", "auto"),
    "fp8_enable_fsdp_float8_all_gather": rules.unsupported("parameters are sent as they are"),
    **LORA_PLUS,
}

DATA: Table = {
    "template": named_template,
    **each_way("tool_format default_system", template_setting),
    "enable_thinking": allowed(True, hint="set it in the rows' chat_template_kwargs"),
    "preserve_thinking": allowed(False, hint="set it in the rows' chat_template_kwargs"),
    "cutoff_len": sets("cutoff", rules.positive),
    "train_on_prompt": when_on("data.loss", "all"),
    "mask_history": when_on("data.loss", "last"),
    "packing": sets("packing", rules.truth),
    "neat_packing": sets("neat", rules.truth),
    "val_size": held_out,
    "max_samples": _whole,
    "mix_strategy": allowed("concat", "interleave_over", hint="use interleave_over, with weights"),
    "streaming": rules.passes("rows come in the order of every run"),
    "buffer_size": rules.follows("streaming"),
    "dataset_dir": rules.passes("is where the files of the data sets are"),
    "ignore_pad_token_for_loss": allowed(True),
}
