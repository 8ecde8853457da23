"""Tools that are recognised by keys that they alone have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AXOLOTL, LLAMA_FACTORY, TORCHTUNE = "axolotl", "LLaMA-Factory", "torchtune"
TRANSLATED = (AXOLOTL, LLAMA_FACTORY, TORCHTUNE)
"""Tools with a translator of their own."""

KEYS: Mapping[str, frozenset[str]] = {
    tool: frozenset(keys.split())
    for tool, keys in {
        "ms-swift": "rlhf_type sft_type train_type tuner_backend tuner_type",
        AXOLOTL: "base_model lora_target_linear micro_batch_size num_epochs rl sample_packing "
        "sequence_len val_set_size",
        LLAMA_FACTORY: "cutoff_len dataset_dir finetuning_type lora_rank lora_target neat_packing "
        "pref_beta quantization_bit template",
        "TRL for preference or reinforcement learning": "beta center_rewards_coefficient cpo_alpha "
        "desirable_weight kl_coef label_smoothing lmbda max_completion_length max_prompt_length "
        "num_generations num_ppo_epochs simpo_gamma use_vllm",
        "Megatron": "pipeline_model_parallel_size tensor_model_parallel_size",
        "Lightning": "exp_manager seed_everything trainer",
        "peft (adapter_config.json)": "base_model_name_or_path peft_type",
        "a model (config.json)": "architectures vocab_size",
    }.items()
}
"""Tool -> keys of its files. One of them identifies the tool, the first in this order; accelerate,
DeepSpeed and transformers have none of them."""
COMPONENT = "_component_"
"""Key of torchtune's blocks."""


def tool_of(content: Mapping[str, Any]) -> str | None:
    """Return the tool whose file this is; None if no key shows it."""
    if any(isinstance(block, Mapping) and COMPONENT in block for block in content.values()):
        return TORCHTUNE
    return next((tool for tool, keys in KEYS.items() if content.keys() & keys), None)
