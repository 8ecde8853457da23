"""The keys of DeepSpeed's block `zero_optimization`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stages.importing import rules
from stages.importing.accelerate import EXPORTED, OFFLOADS, zero_stage
from stages.importing.rules import Rule, Table, auto, covered, never, only, says, unless

HIDDEN: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "param_persistence_threshold": lambda hidden: 10 * hidden,
}
"""What `auto` becomes of a model's hidden size (transformers.integrations.deepspeed)."""

APART = "it keeps optimizer state in a process of its own, which no checkpoint reaches"


def _count(value: Any) -> int:
    # A bucket of one element is sent after every tensor, as one of none is.
    return max(rules.whole(value), 1)


def extra(key: str) -> Rule:
    """A key that goes to DeepSpeed as it is."""
    return says(f"zero.extra.{key}", rules.as_written)


def _zero(name: str) -> Rule:
    return auto(f"zero.{name}", None, rules.whole)


def _stage_3(name: str) -> dict[str, Rule]:
    """DeepSpeed takes both spellings."""
    rule = _zero(name)
    return {name: rule, f"stage3_{name}": rule}


def _pass(*names: str) -> dict[str, Rule]:
    return {name: extra(name) for name in names}


def _offload(block: str, **more: Rule) -> Table:
    def fact(name: str, reader: Any) -> Rule:
        return auto(f"{block}.{name}", None, reader)

    return {
        "device": says(f"{block}.device", rules.choice(OFFLOADS)),
        "nvme_path": unless(("none",), fact("path", rules.path)),
        "pin_memory": fact("pin_memory", rules.truth),
        "buffer_count": fact("buffer_count", rules.whole),
        **more,
    }


OPTIMIZER_OFFLOAD: Table = _offload(
    "offload_optimizer",
    fast_init=says("offload_optimizer.fast_init", rules.truth),
    pipeline_read=says("offload_optimizer.pipeline_read", rules.truth),
    pipeline_write=says("offload_optimizer.pipeline_write", rules.truth),
    pipeline=covered("DeepSpeed works it out of pipeline_read and pipeline_write"),
    ratio=says("offload_optimizer.ratio", rules.number),
    super_offload=never(APART, "leave it out"),
    cpuadam_cores_perc=covered("belongs to super_offload"),
)
PARAMETER_OFFLOAD: Table = _offload(
    "offload_param",
    buffer_size=says("offload_param.buffer_size", _count),
    max_in_cpu=says("offload_param.max_in_cpu", rules.whole),
)

_gathered = covered(EXPORTED)
_old_offload = covered("offload_optimizer and offload_param have taken its place")

ZERO: Table = {
    "stage": says("zero.stage", zero_stage),
    "offload_optimizer": OPTIMIZER_OFFLOAD,
    "offload_param": PARAMETER_OFFLOAD,
    "reduce_bucket_size": auto("zero.reduce_bucket_size", None, _count),
    "allgather_bucket_size": auto("zero.allgather_bucket_size", None, _count),
    "overlap_comm": auto("zero.overlap_comm", None, rules.truth),
    "contiguous_gradients": auto("zero.contiguous_gradients", None, rules.truth),
    "round_robin_gradients": says("zero.round_robin_gradients", rules.truth),
    "sub_group_size": auto("zero.sub_group_size", None, _count),
    **_stage_3("prefetch_bucket_size"),
    **_stage_3("param_persistence_threshold"),
    **_stage_3("max_live_parameters"),
    **_stage_3("max_reuse_distance"),
    "gather_16bit_weights_on_model_save": _gathered,
    "stage3_gather_16bit_weights_on_model_save": _gathered,
    "stage3_gather_fp16_weights_on_model_save": _gathered,
    "cpu_offload": says("offload_optimizer.device", lambda v: "cpu" if rules.truth(v) else "none"),
    "cpu_offload_param": says(
        "offload_param.device", lambda v: "cpu" if rules.truth(v) else "none"
    ),
    "cpu_offload_use_pin_memory": _old_offload,
    "compute_grad_norm": covered("the gradient norm is always computed"),
    "elastic_checkpoint": covered("checkpoints are read by any number of processes"),
    "load_from_fp32_weights": covered("weights are filled with the source's full precision"),
    "legacy_stage1": never("DeepSpeed itself has given it up", "leave it out"),
    "zenflow": never("it replaces the optimizer step, whose meaning is fixed here", "leave it out"),
    "zero_quantized_nontrainable_weights": never(
        "it rounds frozen weights, which checkpoints hold", "leave it out"
    ),
    "zero_hpz_partition_size": unless((1,), extra("zero_hpz_partition_size"), "is DeepSpeed's own"),
    "reduce_scatter": unless((True,), extra("reduce_scatter"), "is DeepSpeed's own"),
    "allgather_partitions": unless((True,), extra("allgather_partitions"), "is DeepSpeed's own"),
    **_pass(
        *("use_multi_rank_bucket_allreduce", "ignore_unused_parameters", "parameter_alignment"),
        *("zero_quantized_weights", "zero_quantized_gradients", "memory_efficient_linear"),
        *("pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings"),
        *("enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module"),
        *("model_persistence_threshold", "stage3_model_persistence_threshold"),
        *("module_granularity_threshold", "stage3_module_granularity_threshold"),
        *("use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params"),
        *("allgather_sequential", "stage3_allgather_sequential"),
    ),
    **{
        key: only(
            -1, False, 0, why="is off", otherwise="DeepSpeed 0.19 has removed it",
            hint="leave it out",
        )
        for key in ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")
    },
}  # fmt: skip
