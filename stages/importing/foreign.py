"""Files of other tools that share keys with those read here, and so must be told apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FOREIGN: Mapping[str, frozenset[str]] = {
    "axolotl": frozenset(
        {"base_model", "sequence_len", "sample_packing", "lora_target_linear", "rl", "num_epochs"}
    ),
    "LLaMA-Factory": frozenset(
        {
            *("finetuning_type", "stage", "template", "cutoff_len", "dataset_dir", "lora_rank"),
            *("lora_target", "pref_beta", "pref_loss", "quantization_bit"),
        }
    ),
    "ms-swift": frozenset({"tuner_type", "train_type", "sft_type", "rlhf_type", "tuner_backend"}),
    "TRL for preference or reinforcement learning": frozenset(
        {
            *("beta", "reference_free", "precompute_ref_log_probs", "precompute_ref_batch_size"),
            *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "ld_alpha"),
            *("f_divergence_type", "discopop_tau", "loss_weights", "use_weighting", "rpo_alpha"),
            *("label_smoothing", "max_prompt_length", "max_completion_length", "num_generations"),
            *("reward_funcs", "reward_weights", "reward_model_path", "center_rewards_coefficient"),
            *("scale_rewards", "desirable_weight", "undesirable_weight", "cpo_alpha", "tpo_alpha"),
            *("simpo_gamma", "kl_coef", "cliprange", "num_ppo_epochs", "whiten_rewards", "lmbda"),
            *("use_vllm", "disable_dropout", "teacher_model_name_or_path", "num_value_samples"),
            *("teacher_model_kind", "teacher_server_urls", "teacher_model_server_url"),
        }
    ),
    "Megatron": frozenset({"tensor_model_parallel_size", "pipeline_model_parallel_size"}),
    "Lightning": frozenset({"trainer", "seed_everything", "exp_manager"}),
    "peft (adapter_config.json)": frozenset({"peft_type", "base_model_name_or_path"}),
    "a model (config.json)": frozenset({"architectures", "vocab_size"}),
}
"""Tool -> keys that none of the files read here has; one of them tells."""

METHOD = re.compile(
    r"lora|adapter|peft|tuner|finetun|freeze|quanti|dpo|rlhf|reward|prefer|ref_model|teacher"
    r"|distill|parallel|(^|_)(tp|pp|cp|sp|ep)_size"
)
"""Names of keys that change what is trained, or how, rather than tune it."""


def tool(content: Mapping[str, Any]) -> str | None:
    """Whose configuration it is, if its keys tell that it is none of those read here."""
    if any(isinstance(value, Mapping) and "_component_" in value for value in content.values()):
        return "torchtune"
    return next((name for name, keys in FOREIGN.items() if keys & content.keys()), None)
