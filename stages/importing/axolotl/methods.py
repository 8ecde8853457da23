"""Keys of axolotl that train something else than a language model on its text, or otherwise."""

from __future__ import annotations

from stages.importing import rules
from stages.importing.rules import Table, each_way, unsupported

_preferences = unsupported(
    "training on preferences or rewards is not supported by recipes", "train with TRL", blocks=True
)
_other = unsupported("no recipe trains like this", blocks=True)
_loss = unsupported("the loss is the mean cross-entropy of the target tokens", blocks=True)
_images = unsupported("recipes train on text only", blocks=True)
_optimizer = unsupported("no optimizer of a recipe has it", "leave it out, or set optimizer.groups")

PLUGINS = (
    "axolotl.integrations.liger.LigerPlugin",
    "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
    "axolotl.integrations.kernels.KernelsPlugin",
    "axolotl.integrations.swanlab.SwanLabPlugin",
)
"""Plugins that change nothing that is trained: kernels, which have keys of their own, and
trackers."""


def plugins(value: object) -> rules.RuleResult:
    """Refuse plugins, unless all of them are known to change nothing that is trained."""
    unknown = [name for name in rules.names(value) if name not in PLUGINS]
    if unknown:
        why = f"{', '.join(unknown)} may change the training"
        return rules.refused(why, "leave it out, if it does not", blocks=True)
    return rules.RuleResult(outcome="default", why="these plugins change nothing that is trained")


METHODS: Table = {
    **each_way(
        "rl reward_model process_reward_model center_rewards_coefficient num_labels trl ebft vllm "
        "dpo_beta dpo_label_smoothing dpo_loss_type dpo_loss_weights dpo_use_weighting "
        "precompute_ref_log_probs rl_beta rpo_alpha orpo_alpha simpo_gamma cpo_alpha "
        "kto_desirable_weight kto_undesirable_weight max_prompt_len",
        _preferences,
    ),
    **each_way(
        "gptq jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps "
        "lisa_n_layers lisa_step_interval qat relora trainer_cls unfrozen_parameters use_pose "
        "use_onebitllms noisy_embedding_alpha scaling_softmax llama4_linearized_experts",
        _other,
    ),
    "relora_prune_method": rules.follows("relora"),
    "lisa_layers_attribute": rules.follows("lisa_n_layers"),
    **each_way(
        "pose_split_on_token_ids pose_max_context_len pose_num_chunks", rules.follows("use_pose")
    ),
    "use_eaft": _loss,
    **each_way("eaft_alpha eaft_k", rules.follows("use_eaft")),
    **each_way("processor_type image_size is_multimodal freeze_mm_modules", _images),
    **each_way("image_resize_algorithm processor_kwargs", rules.follows("processor_type")),
    "plugins": plugins,
    "quantization": rules.untranslated("`axolotl quantize` reads it, training does not"),
    **each_way("embedding_lr embedding_lr_scale lr_groups adam_beta3 adam_epsilon2", _optimizer),
    **each_way("cosine_constant_lr_ratio lr_quadratic_warmup lr_div_factor", _optimizer),
}
