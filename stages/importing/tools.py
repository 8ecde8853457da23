"""Tools that are recognised by keys that they alone have, or that only they have together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRANSLATED = AXOLOTL, LLAMA_FACTORY, TORCHTUNE = "axolotl", "LLaMA-Factory", "torchtune"
"""Tools with a translator of their own."""
COMPONENT = "_component_"
"""Key of torchtune's blocks."""


@dataclass(frozen=True, kw_only=True)
class Tool:
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
        name=name,
        signs=tuple(frozenset(sign.split("+")) for sign in signs.split()),
        advice=" ".join(advice.split()),
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
