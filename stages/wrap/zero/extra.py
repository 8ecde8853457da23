"""Which raw DeepSpeed keys a recipe may add, and why others are refused."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pipeline.errors import Problem
from stages.wrap.zero.schema import top_level_keys, zero_keys

BATCHES = "the train stage decides batches and accumulation"
DTYPES = "the precision slot decides dtypes and loss scaling"
UPDATE = "the optimizer slot decides the optimizer, its schedule and clipping"
SHAPE = "this stage shards over data-parallel ranks only"

DECIDED: Mapping[str, str] = {
    "train_batch_size": BATCHES,
    "train_micro_batch_size_per_gpu": BATCHES,
    "gradient_accumulation_steps": BATCHES,
    "managed_gradient_accumulation": BATCHES,
    "gradient_allreduce_op": BATCHES,
    "optimizer": UPDATE,
    "scheduler": UPDATE,
    "gradient_clipping": UPDATE,
    "zero_allow_untested_optimizer": UPDATE,
    "zero_force_ds_cpu_optimizer": UPDATE,
    "bf16": DTYPES,
    "bfloat16": DTYPES,
    "fp16": DTYPES,
    "torch_autocast": DTYPES,
    "communication_data_type": DTYPES,
    "data_types": DTYPES,
    "pipeline": SHAPE,
    "tensor_parallel": SHAPE,
    "expert_parallel": SHAPE,
    "sequence_parallel_size": SHAPE,
    "aio": "write the field aio",
}
"""Top-level keys that other parts of the recipe decide -> who does."""

ZERO_DECIDED: Mapping[str, str] = {
    **{
        name: f"write the field {name}"
        for name in (
            "stage",
            "reduce_bucket_size",
            "allgather_bucket_size",
            "overlap_comm",
            "contiguous_gradients",
            "round_robin_gradients",
            "sub_group_size",
        )
    },
    **{
        spelling: f"write the field {name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
        )
        for spelling in (name, f"stage3_{name}")
    },
    "cpu_offload": "write the field offload_optimizer",
    "cpu_offload_param": "write the field offload_param",
    "cpu_offload_use_pin_memory": "write pin_memory in the offload blocks",
    "compute_grad_norm": "the gradient norm is always computed",
    "elastic_checkpoint": "a checkpoint is read by as many processes as wrote it",
    "zero_quantized_nontrainable_weights": "it rounds frozen weights, which checkpoints hold",
    "zenflow": "it replaces the optimizer step, whose meaning is fixed here",
}
OFFLOAD_DECIDED = {
    "offload_optimizer": (
        *("device", "nvme_path", "buffer_count", "pin_memory"),
        *("pipeline_read", "pipeline_write", "fast_init", "ratio"),
    ),
    "offload_param": (
        *("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
    ),
}

APART = "it keeps optimizer state in a process of its own, which no checkpoint reaches"
OFFLOAD_REFUSED: Mapping[str, str] = {"super_offload": APART, "cpuadam_cores_perc": APART}


def extra_problems(extra: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys of `extra` that are decided elsewhere, or that the installed DeepSpeed does not know."""
    if not extra:
        return
    for key, value in extra.items():
        where = f"extra.{key}"
        if key == "zero_optimization":
            yield from _zero_problems(where, value)
        elif key in DECIDED:
            yield Problem(key=where, message="is not free", hint=DECIDED[key])
        elif key not in top_level_keys():
            yield _unknown(where, key, top_level_keys())
        elif value == "auto":
            yield Problem(key=where, message="DeepSpeed ignores the value auto")


def _zero_problems(where: str, block: Any) -> Iterator[Problem]:
    if not isinstance(block, Mapping):
        yield Problem(key=where, message="is not a mapping")
        return
    for key, value in block.items():
        inner = f"{where}.{key}"
        if key in OFFLOAD_DECIDED and isinstance(value, Mapping):
            yield from _offload_problems(inner, key, value)
        elif key in ZERO_DECIDED or key in OFFLOAD_DECIDED:
            hint = ZERO_DECIDED.get(key, f"write the field {key}")
            yield Problem(key=inner, message="is not free", hint=hint)
        else:
            yield from _known_problems(inner, key, value, zero_keys())


def _offload_problems(where: str, block: str, values: Mapping[str, Any]) -> Iterator[Problem]:
    known = zero_keys().get(block)
    assert isinstance(known, Mapping)
    for key, value in values.items():
        if key in OFFLOAD_DECIDED[block]:
            field = "path" if key == "nvme_path" else key
            hint = f"write the field {block}.{field}"
            yield Problem(key=f"{where}.{key}", message="is not free", hint=hint)
        elif key in OFFLOAD_REFUSED:
            hint = OFFLOAD_REFUSED[key]
            yield Problem(key=f"{where}.{key}", message="is not supported", hint=hint)
        else:
            yield from _known_problems(f"{where}.{key}", key, value, known)


def _known_problems(
    where: str, key: str, value: Any, known: Mapping[str, Any]
) -> Iterator[Problem]:
    if key not in known:
        yield _unknown(where, key, known)
    elif value == "auto":
        yield Problem(key=where, message="DeepSpeed ignores the value auto")
    elif isinstance(known[key], Mapping) and isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _known_problems(f"{where}.{name}", name, inner, known[key])


def _unknown(where: str, key: str, known: Collection[str]) -> Problem:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "see DeepSpeed's configuration reference"
    return Problem(key=where, message="is not a key that the installed DeepSpeed knows", hint=hint)
