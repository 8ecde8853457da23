"""Other tools: the keys by which files are recognised, and hints for their keys in a recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.importing import KeyOutcome
from stages.importing.rules import is_off, rows

TRANSLATED = AXOLOTL, LLAMA_FACTORY, TORCHTUNE = "axolotl", "LLaMA-Factory", "torchtune"
"""Tools with a translator of their own."""
COMPONENT = "_component_"
"""Key of torchtune's blocks."""


class Tool(NamedTuple):
    """A tool, and how its files are recognised."""

    name: str
    signs: tuple[frozenset[str], ...]
    """Keys, those of blocks dotted. A file is the tool's if it has all keys of one of the sets."""
    advice: str = ""
    """What to do with a file that is not translated."""


_INIT = "write a recipe with `pipe init`, for the model in the layout of Hugging Face"
_TOOLS = f"""
    gpt-neox: pipe_parallel_size pipe-parallel-size model_parallel_size+num_layers \
        attention_config checkpoint_factor checkpoint-factor lr_decay_iters lr-decay-iters -- \
        convert its checkpoint with tools/ckpts/convert_neox_to_hf.py, and {_INIT}
    nanotron: data_stages general+parallelism parallelism.dp parallelism.pp_engine \
        tokens.train_steps tokens.micro_batch_size -- convert its checkpoint with nanotron's \
        convert_nanotron_to_hf.py, and {_INIT}
    litgpt: train.lr_warmup_steps train.save_interval train.max_tokens \
        train.global_batch_size+out_dir lora_query lora_projection -- convert its checkpoint with \
        `litgpt convert_from_litgpt`, and {_INIT}
    fairseq2: regime gang dataset.family model.family+tokenizer trainer.gradient_accumulation -- \
        {_INIT}
    verl: actor_rollout_ref algorithm.adv_estimator model.partial_pretrain data.train_files -- for \
        fine-tuning, write a recipe with `pipe init`; train on rewards with verl
    NeMo: exp_manager step_scheduler packed_sequence trainer+model.micro_batch_size \
        trainer+model.restore_from_path policy+cluster -- convert its checkpoint with NeMo's \
        export to Hugging Face, and {_INIT}
    Lightning: seed_everything trainer fit.trainer -- {_INIT}
    Megatron: pipeline_model_parallel_size tensor_model_parallel_size pipeline-model-parallel-size \
        tensor-model-parallel-size -- convert its checkpoint with Megatron Bridge, and {_INIT}
    ms-swift: rlhf_type sft_type train_type tuner_backend tuner_type -- for fine-tuning, write a \
        recipe with `pipe init`; train on preferences with ms-swift
    open-instruct: dataset_mixer_list hf_metadata_dataset dataset_mix_dir use_slow_tokenizer \
        with_tracking checkpointing_steps chat_template_name ground_truths_key \
        keep_last_n_checkpoints -- for finetune.py, write a recipe with `pipe init`; train on \
        preferences or rewards with open-instruct
    alignment-handbook: dataset_mixer -- for SFT, take dataset_mixer and dataset_splits out, and \
        import what is TRL's; data sets are `data.sources` of the recipe
    LLaMA-Factory v1: model_class dist_config kernel_config sample_backend \
        train_dataset+micro_batch_size train_dataset+cutoff_len init_config+template -- give the \
        recipe of LLaMA-Factory 0.9 (finetuning_type, dataset, ...)
    mergekit: merge_method+slices merge_method+models -- merge first, and train what comes out
    AutoTrain: base_model+task base_model+project_name -- {_INIT}
    axolotl: base_model+datasets base_model+pretraining_dataset base_model+sequence_len \
        base_model+micro_batch_size base_model+sample_packing base_model+num_epochs \
        base_model+val_set_size base_model+rl --
    LLaMA-Factory: finetuning_type neat_packing pref_beta cutoff_len+template \
        cutoff_len+dataset_dir cutoff_len+lora_target cutoff_len+quantization_bit cutoff_len+stage \
        stage+template template+dataset_dir template+lora_target template+quantization_bit \
        template+infer_backend template+export_dir --
    TRL for preference or reinforcement learning: beta center_rewards_coefficient cpo_alpha \
        desirable_weight disable_dropout generate_during_eval kl_coef label_smoothing lmbda \
        max_completion_length max_prompt_length missing_eos_penalty num_generations num_ppo_epochs \
        precompute_ref_log_probs reference_free reward_funcs reward_model_path rloo_k rpo_alpha \
        scale_rewards sft_model_path simpo_gamma sync_ref_model undesirable_weight use_vllm -- \
        recipes train on text, not on preferences or rewards: train with TRL
    peft (adapter_config.json): base_model_name_or_path peft_type --
    a model (config.json): architectures vocab_size --
"""
TOOLS = tuple(
    Tool(
        name, tuple(frozenset(sign.split("+")) for sign in signs.split()), " ".join(advice.split())
    )
    for name, signs, advice in re.findall(r"^ *(.+?): (.*?) --(.*)$", _TOOLS, re.MULTILINE)
)
"""A file is of the first tool whose sign it has; accelerate, DeepSpeed and transformers have none
of them."""


def tool_of(content: Mapping[str, Any]) -> str | None:
    """Return the tool whose file this is; None if no keys show it."""
    if any(isinstance(block, Mapping) and COMPONENT in block for block in content.values()):
        return TORCHTUNE
    found = {*content}
    for key, block in content.items():
        found |= {f"{key}.{name}" for name in block} if isinstance(block, Mapping) else set()
    return next((tool.name for tool in TOOLS if any(map(found.issuperset, tool.signs))), None)


def advice_on(tool: str) -> str:
    """Return what to do with a file of that tool, empty if there is nothing to say."""
    return next((each.advice for each in TOOLS if each.name == tool), "")


KEYS = rows("""
    gpus num_gpus n_gpus devices nproc_per_node nprocs world_size: launch.procs
    nnodes num_nodes num_machines: launch.nodes | accelerator: launch.device
    max_restarts: launch.restarts.limit | rdzv_timeout: launch.timeouts.rendezvous
    ddp_timeout: launch.timeouts.collectives | lora peft peft_config: adapter.use
    qlora: adapter.quantize | completion_only_loss: data.loss | eval_on_start: train.eval_first
    strategy: wrap.use | max_epochs: train.epochs | accumulate_grad_batches: train.accumulation
    every_n_train_steps save_interval: checkpoint.every | local_batch_size: train.micro_batch_size
    max_norm clip_grad gradient_clip_val: optimizer.max_grad_norm
    data_parallel_shard_degree: wrap.shard_size
    tensor_parallel_degree tp_size tensor_model_parallel_size: wrap.tensor_parallel.size
    pipeline_parallel_degree pp_size pipeline_model_parallel_size: wrap.pipeline_parallel.size
    context_parallel_degree cp_size: wrap.context_parallel.size
    expert_parallel_degree ep_size expert_model_parallel_size: wrap.expert_parallel.size
    seq_len seq_length: data.sequence_length | keep_latest_k: checkpoint.keep
    train_iters: train.steps | save: checkpoint.folder | eval_interval: train.eval_every
    log_interval: train.log_every | lr_warmup_iters: optimizer.warmup_steps
""")
"""Keys of torchrun, SkyPilot, Lightning, accelerate, torchtitan, NeMo and Megatron, and of TRL
where the form of rows does not matter."""
STRATEGIES = {"ddp": "wrap.ddp", "fsdp": "wrap.fsdp", "deepspeed": "wrap.zero"}
"""Beginnings of names of strategies, as in Lightning's `deepspeed_stage_3`."""
ADVICE = rows("""
    resume_from_checkpoint load ckpt_path: leave it out: `pipe resume [RUN]` continues a run; for \
        another tool's checkpoint: pipe convert CHECKPOINT NEW --to canonical, then \
        checkpoint.start_from: NEW
    output_dir: leave it out: `pipe run RECIPE --run-dir {value}` names the folder of a run
    overwrite_output_dir: leave it out: each run has a new folder
    machine_rank main_process_ip main_process_port: leave it out: pipe run RECIPE --nodes NODES \
        --node-rank NUMBER --rdzv HOST:PORT
    dtype: write `compute: bf16` or `compute: fp16` in slot `precision`, the dtype to train in; \
        `dtype` of an export slot is for the exported weights
    deepspeed: its settings stand in slot `wrap` with `use: wrap.zero`: `pipe import config.yaml \
        {value}` translates both
    datasets: write `files: PATH`, or `sources: [{{dataset: OWNER/NAME, split: train}}]`
    batch_size: per device: `micro_batch_size: {value}`, over all: `global_batch_size: {value}`
    zero_optimization: its fields stand in slot `wrap` itself, as in `stage: 3`; pipe import \
        translates DeepSpeed's files
    nccl: here that is `collectives`
    per_device_eval_batch_size eval_batch_size eval_accumulation_steps: leave it out: evaluation \
        uses `micro_batch_size`
    eval_strategy:no evaluation_strategy:no: leave it out: without `eval_every`, only the end of \
        the training is evaluated
    bf16:no bfloat16:no: write `compute: fp32` in slot `precision`, where bf16 is the default
    logging_strategy: write `log_every` in slot `train`: steps between two lines
    model_init_kwargs: write its settings in slot `model`: `attention`, `revision`, ...
    label_smoothing_factor: leave it out: recipes have no label smoothing
    neftune_noise_alpha: leave it out: recipes have no noise on embeddings
    group_by_length: leave it out: recipes have no order by length; `packing: true` in slot `data` \
        avoids padding
    lora_bias: leave it out: recipes have no biases that are trained with an adapter
    eval_packing: leave it out: held-out rows are packed as the others
    padding_free: leave it out: `packing: true` in slot `data` avoids padding
    save_only_model: leave it out: a checkpoint has the whole training state, an export the model \
        only
""")
"""Key, or `key:value` -> what to do about it; of a key on its own, where the value is not off."""
ALWAYS = rows("""
    do_train save_safetensors lora_bias:none: leave it out: every recipe does this
    do_eval: leave it out: every recipe with held-out data is evaluated
    remove_unused_columns gradient_checkpointing_kwargs lora_inference_mode dataloader_pin_memory
    disable_tqdm logging_first_step dataset_num_proc ddp_backend log_level
    dataloader_persistent_workers: leave it out: a recipe has nothing like it, and the training \
        does not change
""")
"""As ADVICE, also for values that are off."""


def advice(key: str, value: Any) -> str:
    """Return what to do about a key in a recipe; empty if its outcome says it."""
    pair = f"{key}:{'no' if value is False else value}"
    found = ADVICE.get(pair) or ALWAYS.get(pair) or ALWAYS.get(key) or ADVICE.get(key, "")
    if found and is_off(value) and found is ADVICE.get(key):
        found = "leave it out: {value} is the default"
    shown = "..." if isinstance(value, Mapping | list) else value
    return found.format(value=shown if isinstance(shown, str) else json.dumps(value))


def outcome(key: str, value: Any) -> KeyOutcome | None:
    """Return what a recipe makes of a key; None if no tool here has it."""
    to = KEYS.get(key)
    if to == "wrap.use":
        value = next((use for name, use in STRATEGIES.items() if str(value).startswith(name)), None)
    meant = {
        "adapter.use": "adapter.lora" if value else None,
        "adapter.quantize": "nf4" if value else None,
        "data.loss": "completion" if value else "all",
    }
    return KeyOutcome(outcome="translated", to={to: meant.get(to, value)}) if to else None
