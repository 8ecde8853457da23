"""The keys of a torchtune recipe, and of its blocks but for data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.importing import rules
from stages.importing.draft import Draft
from stages.importing.engines import FSDP
from stages.importing.rules import RuleResult, Table, outcome, rule, table
from stages.importing.tools import COMPONENT
from stages.importing.trackers import WANDB, other_tracker, own_run
from stages.importing.trainer import LORA, SHARED

COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"


def _compile(value: Any) -> RuleResult:
    on = value.get("model", True) if isinstance(value, Mapping) else value
    return rule("model.compile = {}")(on)


TOP = table("""
    output_dir: output_name recipe_name | save_adapter_weights_only: export.adapter = true
    seed: seed whole | shuffle: train.shuffle truth | epochs: @num_train_epochs
    batch_size: @per_device_train_batch_size | gradient_accumulation_steps: accumulation positive
    max_steps_per_epoch: cap positive off=-1 | clip_grad_norm: optimizer.max_grad_norm max_norm
    compile: @compile | log_every_n_steps: train.log_every positive
    run_val_every_n_steps: train.eval_every positive | device: launch.device cpu=cpu off=cuda
    dtype: precision.compute fp32, bf16, fp16 !! use bf16
    enable_activation_checkpointing: model.activation_checkpointing = {}
    enable_activation_offloading: model.activation_checkpointing.offload = true
    ac_mode: always full, selective
    ac_option: if [0-9]+ then model.activation_checkpointing.every positive else untranslated \
        model.activation_checkpointing has other choices

    fsdp_cpu_offload fsdp.cpu_offload: fsdp.cpu_offload truth
    fsdp_reshard_after_forward: @sharding | tensor_parallel_dim: parallel.tensor positive
    context_parallel_dim: parallel.context positive
    tensor_parallel_plan: ignored layers are divided by the architecture's plan
    data_parallel_replicate_dim: parallel.replicate positive
    data_parallel_shard_dim: parallel.shard positive off=-1
    collate_fn: if (?i)torchtune.data.padded_collate_(sft|packed) then ignored every recipe does \
        so else never samples are put together by data.chat and data.text !! leave it out
    profiler: untranslated train.profile_steps names steps to record
    quantizer fake_quant_after_n_steps teacher_model teacher_checkpointer kd_ratio kd_loss
    ref_checkpointer ref_policy_checkpointer policy_model reward_checkpointer reward_and_value_model
    value_checkpointer ppo_epochs ppo_batch_size: refused no recipe trains like this !!
    optimizer_in_bwd custom_sharded_layers low_cpu_ram memory_efficient_fsdp_wrap
    cudnn_deterministic_mode enable_async_checkpointing log_peak_memory_stats log_level
    use_distributed_state_dict batch_size_val: ignored changes speed or memory, no number
    resume_from_checkpoint: @resume_from_checkpoint
    [tokenizer]
    max_seq_len: @max_length | prompt_template: @named_template
    _component_ path merges_file merges_path vocab_path special_tokens_path special_tokens: \
        ignored the tokenizer comes from the model's folder
    [checkpointer]
    _component_: if (?i)torchtune.training.fullmodelhfcheckpointer then ignored every recipe does \
        so else never model.hf reads the layout of Hugging Face -- name a folder with config.json \
        and safetensors in model.path
    checkpoint_dir: model path
    recipe_checkpoint adapter_checkpoint should_load_recipe_state: @resume_from_checkpoint
    checkpoint_files output_dir model_type safe_serialization keep_last_n_checkpoints: ignored the \
        model's folder says it, or the run's
    [optimizer]
    _component_: foreign optim torch.optim.adamw={}, bitsandbytes.optim.adamw={}, \
        bitsandbytes.optim.pagedadamw={}, bitsandbytes.optim.adamw8bit={"moments":"8bit"}, \
        bitsandbytes.optim.pagedadamw8bit={"moments":"8bit"}, \
        torchao.optim.adamw8bit={"moments":"8bit"}, \
        torchao.prototype.low_bit_optim.adamw8bit={"moments":"8bit"}
    lr weight_decay eps: optimizer.* number
    betas: betas betas | amsgrad: always false
    fused foreach capturable block_wise min_8bit_size percentile_clipping: ignored changes speed \
        or memory, no number
    [lr_scheduler]
    _component_: schedule schedules -- set optimizer.schedule | num_warmup_steps: warmup_steps whole
    num_cycles: always 0.5
    [loss]
    _component_: if \
        (?i)torch(tune.modules.loss.(cewithchunkedoutput|linearcrossentropy)|.nn.crossentropy)loss \
        then ignored every recipe does so else never the loss is the mean cross-entropy of the \
        target tokens !! use CEWithChunkedOutputLoss
    num_output_chunks: ignored changes speed or memory, no number | ignore_index: always -100
    [optimizer lr_scheduler loss]
    *: refused no recipe has this argument !!
    [metric_logger]
    _component_: @other_tracker | *: ignored follows _component_
""", **SHARED | {
    "compile": _compile,
    "sharding": FSDP["reshard_after_forward"], "schedules": {COSINE: "cosine"},
    "other_tracker": other_tracker,
})  # fmt: skip
"""Keys, where torchtune hands those of some blocks on."""
_RECORDED = table("*: ignored metrics.jsonl in the run folder has it all")
_LOGGERS: Mapping[str, Table] = {
    "wandblogger": {**WANDB, **table("""
        _component_: report_to asks | id run_id resume: @own_run
        log_dir dir log_strategy: ignored the run has a folder
    """, asks=lambda value: ["wandb"], own_run=own_run)},
    "tensorboardlogger": table("""
        _component_: report_to asks | log_dir: tensorboard.folder path
        organize_logs: ignored each run has its own folder
    """, asks=lambda value: ["tensorboard"]),
    "disklogger": _RECORDED, "stdoutlogger": _RECORDED,
}  # fmt: skip
"""Name in lower case -> rules of its block."""


def logger(block: Any) -> Table:
    """Return the rules of the block that names a logger of metrics."""
    name = str(block.get(COMPONENT, "")) if isinstance(block, Mapping) else ""
    return _LOGGERS.get(name.rpartition(".")[2].lower(), TOP["metric_logger"])


FAMILIES = ("code_llama2", "gemma", "gemma2", "llama2", "llama3", "llama3_1", "llama3_2",
            "llama3_3", "mistral", "phi3", "phi4", "qwen2", "qwen2_5", "qwen3")  # fmt: skip
FUSED = ("phi3", "phi4")
"""Families whose projections are one layer in the layout of Hugging Face."""
PLAIN = ("gemma", "gemma2")
"""Families whose tokenizer puts nothing around messages."""
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
"""Layer in torchtune -> in the layout of Hugging Face."""


def family(block: Any) -> str:
    """Return the family in the name of a block's builder, empty if it is not torchtune's."""
    words = str(block.get(COMPONENT) if isinstance(block, Mapping) else "").split(".")
    return words[2] if words[:2] == ["torchtune", "models"] and len(words) == 4 else ""


def _builder(value: Any) -> RuleResult:
    known = family({COMPONENT: value}) in FAMILIES
    if not known or "classifier" in str(value) or "reward" in str(value):
        families = f"the families are {', '.join(FAMILIES)}"
        return outcome(f"refused is not a known language model !! {families}")
    if str(value).rpartition(".")[2].startswith(("lora_", "qlora_")):
        return rules.translated("adapter", True)
    return outcome("ignored the config.json in checkpoint_dir says it")


def _attention(value: Any) -> list[str]:
    names = rules.names(value)
    if unknown := [name for name in names if name not in ATTENTION]:
        raise rules.WrongValueError(f"{unknown[0]!r} is not a layer of attention !!")
    return [ATTENTION[name] for name in names]


MODEL = table("""
    _component_: @builder | lora_attn_modules: tune.attention attention
    apply_lora_to_mlp: tune.mlp truth | apply_lora_to_output: tune.output truth | lora_rank: @lora_r
    lora_alpha: @lora_alpha | lora_dropout: @lora_dropout | use_dora: @use_dora
    quantize_base: quantize = true | *: refused no recipe has this argument !!
""", builder=_builder, attention=_attention, **LORA)  # fmt: skip
MODEL_FUSED = MODEL | table("""
    lora_attn_modules apply_lora_to_mlp apply_lora_to_output: refused torchtune has parts of what \
        is one layer in the layout of Hugging Face -- set adapter.targets: qkv_proj, o_proj, \
        gate_up_proj, ...
""")


def set_adapter(draft: Draft, file: str, block: Any) -> None:
    """Set what the block `model`, whose keys were read, says of an adapter."""
    builder = str(block.get(COMPONENT, "")).rpartition(".")[2] if isinstance(block, Mapping) else ""
    if builder.startswith("qlora_"):
        draft.default("quantize", True, f"{builder} in {file}")
    draft.default("adapter", False, "the model's builder has no LoRA")
    if not draft.value("adapter"):
        return
    for name, value in (("rank", 8), ("alpha", 16.0), ("dropout", 0.0)):
        draft.default(f"adapter.{name}", value, "torchtune's default")
    found = [*draft.value("tune.attention", [])]
    found += ("gate_proj", "up_proj", "down_proj") if draft.value("tune.mlp") else ()
    found += ["lm_head"] if draft.value("tune.output") else []
    for fact in ("tune.attention", "tune.mlp", "tune.output"):
        draft.rename(fact, "adapter.targets" if found else fact, content=found)
