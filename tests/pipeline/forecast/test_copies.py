"""What a step moves between a GPU and its host, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from pipeline.forecast.placement import Copies

from stages.adapter.lora import Lora
from stages.model.hf import HfModel
from stages.model.options import ActivationCheckpointing
from stages.wrap.fsdp import Fsdp
from stages.wrap.zero.options import OptimizerOffload, ParameterOffload
from stages.wrap.zero.stage import Zero
from tests.support.forecasts import LLAMA, Told, declared

ROOT = 2 * 8000 * 512 + 512
BLOCKS = 4 * (2 * 512 * 512 + 2 * 128 * 512 + 3 * 1408 * 512 + 2 * 512)
ALL = ROOT + BLOCKS
WHOLE = 8000 * 512 + BLOCKS // 2 + 512 * 512


def copies(wrap: Any, accumulation: int, **fields: Any) -> Copies:
    told = Told(wrap, declared(LLAMA), ranks=2, length=64, accumulation=accumulation, **fields)
    return told.placement.copies(told.step.microbatches)


@pytest.mark.parametrize(
    ("fields", "up", "down"),
    [
        # Shards go up in fp32, blocks for backward again, and gradients down in fp32.
        ({}, 3 * 4 * (ROOT + 2 * BLOCKS) // 2, 3 * 4 * ALL // 2),
        ({"sharding": "shard_grad_op"}, 3 * 4 * ALL // 2, 3 * 4 * ALL // 2),
        ({"reduce_every_microbatch": False}, 3 * 4 * (ROOT + 2 * BLOCKS) // 2, 4 * ALL // 2),
    ],
)
def test_fsdp(fields: dict[str, Any], up: int, down: int) -> None:
    assert copies(Fsdp(cpu_offload=True, **fields), 3) == Copies(up=up, down=down)
    assert copies(Fsdp(**fields), 3) == Copies()


def test_fsdp_of_weights_that_are_borrowed() -> None:
    """They are held in the compute dtype, and have no gradient."""
    shape = Lora(rank=8).forecast(None, declared(LLAMA))  # type: ignore[arg-type]
    told = Told(Fsdp(cpu_offload=True), shape, ranks=2, length=64)
    updates = 4 * 8 * (2 * (512 + 512) + 2 * (128 + 512) + 3 * (1408 + 512))
    up = (2 * (ROOT + 2 * BLOCKS) + 4 * 2 * updates) // 2
    assert told.placement.copies(1) == Copies(up=up, down=4 * updates // 2)


CPU, DISK = OptimizerOffload(), OptimizerOffload(device="nvme", path="/nvme")


@pytest.mark.parametrize(
    ("fields", "compute", "expected"),
    [
        ({"stage": 1}, "bf16", Copies()),
        # Each of two ranks has a half. Gradients are summed on the device, in fp32; updated weights
        # go up in bf16.
        ({"stage": 2, "offload_optimizer": CPU}, "bf16", Copies(up=ALL, down=2 * ALL)),
        # In fp32 they are summed in host memory: three times whole ones down, twice up. The first
        # rank has the embedding, two blocks, and a part of the next one's first matrix.
        (
            {"stage": 2, "offload_optimizer": CPU},
            "fp32",
            Copies(up=2 * ALL + 2 * 4 * WHOLE, down=2 * ALL + 3 * 4 * WHOLE),
        ),
        # Stage 3 sums in host memory: up for each of three micro-batches, and down; then down to
        # the masters.
        (
            {"stage": 3, "offload_optimizer": CPU},
            "bf16",
            Copies(up=7 * ALL, down=8 * ALL),
        ),
        # Parameters are gathered twice each time.
        (
            {
                "stage": 3, "offload_param": ParameterOffload(), "max_reuse_distance": 0,
                "prefetch_bucket_size": 0, "param_persistence_threshold": 0,
            },
            "bf16",
            Copies(up=3 * 2 * ALL, down=2 * ALL),
        ),
        # On disks there are fp32 masters, their gradients and two moments.
        (
            {"stage": 3, "offload_optimizer": DISK},
            "bf16",
            Copies(up=7 * ALL, down=8 * ALL, disk=2 * 4 * 2 * ALL),
        ),
    ],
)  # fmt: skip
def test_zero(fields: dict[str, Any], compute: str, expected: Copies) -> None:
    assert copies(Zero(**fields), 3, compute=compute, kernel="foreach") == expected


def test_activations_that_are_offloaded() -> None:
    """The inputs of two of four blocks: 512 numbers of 2 bytes a token, there and back."""
    asked = ActivationCheckpointing(every=2, offload=True)
    shape = HfModel(config=LLAMA, activation_checkpointing=asked).forecast(None)  # type: ignore[arg-type]
    told = Told(Fsdp(), shape, ranks=2, micro=2, length=64, accumulation=3)
    size = 6 * 64 * 2 * 512 * 2
    assert told.step.copies == Copies(up=size, down=size)
    assert Told(Fsdp(), declared(LLAMA, again=True), ranks=2, length=64).step.copies == Copies()
