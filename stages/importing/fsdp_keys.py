"""FSDP's keys: `fsdp_config` of accelerate and of transformers, without the prefix `fsdp_`."""

from __future__ import annotations

from typing import Any

from stages.importing import read
from stages.importing.rules import Table, covered, never, says, switched, unless

SHARDINGS = {
    "full_shard": "full_shard",
    "shard_grad_op": "shard_grad_op",
    "no_shard": "no_shard",
    "hybrid_shard": "hybrid_shard",
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
    "true": "full_shard",
    "false": "shard_grad_op",
}
"""What torch's ShardingStrategy is called, numbered, or in FSDP2 (`reshard_after_forward`)."""

SAVED = "checkpoints and the export are whole under every strategy"
LOADED = "every rank reads its own part of the weights, and no other"


def prefetch_units(value: Any) -> int:
    """FSDP1's flag as a number of units."""
    return 1 if read.truth(value) else 0


_sharding = says("fsdp.sharding", read.choice(SHARDINGS, "use FULL_SHARD or HYBRID_SHARD"))
_classes = unless(("", []), says("fsdp.classes", read.names))
_offload = says("fsdp.cpu_offload", read.truth)
_backward = covered("FSDP2 gathers one unit ahead in backward; numbers are the same")

FSDP: Table = {
    "version": says("fsdp.version", read.choice({"1": 1, "2": 2}), "wrap.fsdp is always FSDP2"),
    "sharding_strategy": _sharding,
    "reshard_after_forward": _sharding,
    "offload_params": _offload,
    "cpu_offload": _offload,
    "auto_wrap_policy": says(
        "fsdp.units",
        read.choice(
            {"transformer_based_wrap": "block", "size_based_wrap": "size", "no_wrap": "none"}
        ),
    ),
    "transformer_layer_cls_to_wrap": _classes,
    "transformer_cls_names_to_wrap": _classes,
    "min_num_params": unless((0,), says("fsdp.unit_size", read.positive)),
    "forward_prefetch": says("fsdp.forward_prefetch", prefetch_units),
    **dict.fromkeys(("backward_prefetch", "backward_prefetch_policy"), _backward),
    "state_dict_type": covered(SAVED),
    "state_dict_config": covered(SAVED),
    "optim_state_dict_config": covered(SAVED),
    "use_orig_params": covered("FSDP2 always keeps the parameters as they are"),
    "sync_module_states": covered(LOADED),
    "cpu_ram_efficient_loading": covered(LOADED),
    "param_init_fn": never("code cannot stand in a recipe"),
    "limit_all_gathers": covered("FSDP2 limits them by itself"),
    "activation_checkpointing": switched("recompute"),
    "activation_checkpointing_offload": switched("recompute_offload"),
    "ignored_modules": never("every module is sharded"),
    "mixed_precision_policy": never(
        "dtypes have a slot of their own", "set compute and reduce in the precision slot"
    ),
    "xla": never("there is no XLA here", blocks=True),
    "xla_fsdp_v2": never("there is no XLA here", blocks=True),
    "xla_fsdp_grad_ckpt": never("there is no XLA here", blocks=True),
    "xla_fsdp_settings": never("there is no XLA here", blocks=True),
}
"""Keys without their prefix."""

FSDP_PREFIXED: Table = {**FSDP, **{f"fsdp_{key}": rule for key, rule in FSDP.items()}}
"""Both tools take them with and without it."""
