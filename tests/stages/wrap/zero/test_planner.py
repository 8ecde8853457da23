"""ZeRO's share of memory and copies by hand (tests/benchmarks/test_allocations.py: real runs)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.optimizer import Precision
from pipeline.planning.forecast import Copies, Moment
from pipeline.planning.shapes import ModelShape, OptimizerShape, Topology, Weight
from stages.wrap.axes import TensorParallel
from stages.wrap.zero import OptimizerOffload, ParameterOffload, PlusPlus, Zero
from stages.wrap.zero.planner import ZeroMemory, ZeroPlanner

HOST = {"offload_optimizer": OptimizerOffload()}
BOTH = {**HOST, "offload_param": ParameterOffload()}
DISK = {"offload_optimizer": OptimizerOffload(device="nvme", path="/swap")}
N = 12_000_000
"""Elements of `model()`: two blocks of ten weights between the embeddings and a head of the same
size."""


def model(
    blocks: int = 2, elements: int = N // 4, *, tied: bool = False, frozen: Any = None
) -> ModelShape:
    """Return blocks of ten weights, embeddings and head of a block's size. `frozen`: fields of
    frozen weights in each block, of twice the block's elements."""
    root = [Weight(name=name, shape=(elements,)) for name in ("embeddings", "head")[: 2 - tied]]
    block = [Weight(name=f"{number}", shape=(elements // 10,)) for number in range(10)]
    if frozen is not None:
        block.append(Weight(name="base", shape=(2 * elements,), trained=False, **frozen))
    return ModelShape(
        root=tuple(root), kinds=(tuple(block),), blocks=(0,) * blocks, late=(), tied=tied,
        vocabulary=elements, parameters=0, exported=0, proven=0,
    )  # fmt: skip


def share(
    wrap: dict[str, Any], shape: ModelShape | None = None, ranks: int = 4, bits: float = 64,
    taken: float = 0, **policy: Any,
) -> ZeroMemory:  # fmt: skip
    """Return the share of a stage on a model, by default in bf16 with fp32 masters."""
    policy = {"compute": "bf16", "master": "fp32", "reduce": "fp32", **policy}
    precision = Precision(buffer=None, loss_scaling=None, **policy)
    profile: Any = SimpleNamespace(model=shape or model())
    optimizer = OptimizerShape(algorithm="adamw", bits=bits, moments=2, taken=taken)
    topology = Topology(ranks=ranks, local_ranks=ranks, device="cuda")
    return ZeroPlanner(Zero(**wrap)).forecast(topology, profile, precision, optimizer)


def at(memory: ZeroMemory, *moment: Any, place: str = "device", name: str = "") -> int:
    """Return the bytes at a moment and a place, of everything or of the items of a name."""
    held = memory.held(Moment(*moment))
    return sum(one.bytes for one in held if one.where == place and name in ("", one.name))


BUCKET = {"reduce_bucket_size": 1000, "param_persistence_threshold": 0}


@pytest.mark.parametrize(
    ("event", "wrap", "how", "places"),
    [
        # Rajbhandari et al. 2020, section 5: with 4 ranks, 2 N + 2 N + 12 N / 4 at stage 1, whose
        # class for bf16 keeps sums of gradients in fp32; at stage 2 those only from backward to
        # the step; at stage 3 16 N / 4, where they are in fp32 and there is a bucket, in fp32 too.
        ("between", {"stage": 1}, {}, [2 * N + 4 * N + 3 * N]),
        ("between", {"stage": 1}, {"compute": "fp16"}, [2 * N + 3 * N]),
        ("between", {"stage": 2}, {}, [2 * N + 3 * N]),
        ("between", {"stage": 2}, {"compute": "fp32"}, [4 * N + 3 * N]),
        ("between", {"stage": 3}, {}, [(2 + 12 + 4) * N // 4 + 4000]),
        # bf16 masters; moments in 8 bits, with a scale for each of their blocks.
        ("between", {"stage": 2}, {"master": "bf16", "bits": 16.25}, [2 * N + 12_093_750]),
        # Offloaded: masters, their gradients, two moments in fp32; updated weights, and a buffer
        # of the largest parameter on either side.
        ("between", {"stage": 2, **HOST}, {}, [2 * N + N // 2, 18 * N // 4 + N // 2]),
        ("between", {"stage": 3, **HOST}, {}, [2 * N // 4 + 4000, (12 + 4 + 4) * N // 4]),
        ("between", {"stage": 3, **BOTH}, {}, [4000, (2 + 12 + 4 + 4) * N // 4]),
        # On disk: masters, gradients, moments. Four buffers of a rank's whole part.
        ("between", {"stage": 3, **DISK}, {}, [2 * N // 4 + 4000, 5 * N, (4 + 4 + 8) * N // 4]),
        # Frozen weights have no states; 4-bit ones are bytes.
        ("between", {"stage": 2}, {"shape": model(frozen={})}, [5 * N + 2 * N]),
        ("between", {"stage": 2}, {"shape": model(frozen={"packed": True})}, [5 * N + N]),
        # Gradients in fp32, and norms of the largest weight in fp64, or what the kernel takes.
        ("step", {"stage": 2}, {}, [5 * N + N + 8 * N // 4]),
        ("step", {"stage": 2}, {"taken": 12}, [5 * N + N + 12 * N // 4]),
        ("step", {"stage": 2}, {"master": "bf16"}, [5 * N - N // 2 + N + 2 * N]),
        ("step", {"stage": 3, "sub_group_size": N // 8}, {"taken": 12}, [13 * N // 2 + 4000]),
    ],
)
def test_bytes(event: str, wrap: dict[str, Any], how: dict[str, Any], places: list[int]) -> None:
    memory = share({**BUCKET, **wrap}, **how)
    found = [at(memory, event, place=place) for place in ("device", "host", "disk")]
    assert found == [*places, 0, 0][:3]


@given(stage=st.sampled_from([1, 2, 3]), ranks=st.integers(1, 600), blocks=st.integers(1, 9))
def test_parts_cover_all_and_become_smaller(stage: int, ranks: int, blocks: int) -> None:
    few, many = (share({"stage": stage}, model(blocks), ranks=w) for w in (ranks, ranks + 1))
    elements, _ = few.masters
    assert N // 4 * (2 + blocks) <= elements * ranks < N // 4 * (2 + blocks) + ranks
    assert ranks == 1 or at(many, "between") <= at(few, "between")
    for event in ("forward", "backward", "reduce"):
        first, later = (at(few, event, 0, turn) for turn in (True, False))
        assert at(few, "between") <= first <= later


@pytest.mark.parametrize(
    ("wrap", "name", "expected"),
    [
        # The bucket is allocated whole; with overlap there are two.
        ({"stage": 2, "overlap_comm": True}, "reduce bucket", [2_000_000_000] * 5),
        ({"stage": 3}, "reduce bucket", [2_000_000_000] * 5),
        # A part of gradients is there from the first reduction on.
        ({"stage": 2, "reduce_bucket_size": 4_000_000}, "gradients", [0, 0, 0, N, N]),
        # The head and a third of the block are sent in fp32, flattened before in bf16, while a
        # tenth of the block waits; at the end the bucket is full too.
        ({"stage": 2, "reduce_bucket_size": 4_000_000}, "reduction",
         [0, 0, 24_600_000, 24_600_000, 30_000_000]),
    ],
)  # fmt: skip
def test_backward(wrap: dict[str, Any], name: str, expected: list[int]) -> None:
    memory, units = share(wrap, model(3, tied=True)), ("head", 2, 1, 0, "embeddings")
    event = "reduce" if name == "reduction" else "backward"
    assert [at(memory, event, unit, name=name) for unit in units] == expected
    waiting = [at(memory, "backward", unit, name="gradient of the tied head") for unit in units]
    assert waiting == [0, N // 2, N // 2, N // 2, N // 2]  # for that of the embeddings


def test_stage_3_gathers_until_the_limit_of_live_parameters() -> None:
    """1e9 elements are whole; a fetch of 5e7 and a weight of 8e7 are in a buffer beside them."""
    memory, name = share({"stage": 3}, model(80, 800_000_000), ranks=64), "parameters in use"
    found = [at(memory, "forward", unit, name=name) for unit in (40, "head")]
    assert found == [2 * 1_130_000_000, 2_000_000_000]
    assert at(memory, "regather", "embeddings", name=name) == 2 * 800_000_000
    # A small model stays whole until backward has used it; in forward everything is in a buffer
    # too.
    small, units = share({"stage": 3, **BUCKET}), ["forward", "regather", "between"]
    assert [at(small, unit, 1, name=name) for unit in units] == [4 * N, 3 * N // 2, 0]
    alone = share({"stage": 3}, ranks=1)
    assert at(alone, "forward", 1) == at(alone, "between")


@pytest.mark.parametrize(
    ("wrap", "compute", "expected"),
    [
        ({"stage": 1}, "bf16", Copies()),
        # Gradients are summed on the device, in fp32; updated weights go up in bf16.
        ({"stage": 2, **HOST}, "bf16", Copies(up=2 * N // 4, down=N)),
        # In fp32, and at stage 3, gradients are summed in host memory: up and down each time.
        ({"stage": 2, **HOST}, "fp32", Copies(up=N + 3 * N, down=N + 3 * N)),
        ({"stage": 3, **HOST}, "bf16", Copies(up=3 * N + N // 2, down=4 * N)),
        # Parameters are read whenever they are gathered, updates are on the host.
        ({"stage": 3, **BOTH}, "bf16", Copies(up=3 * N + 3 * N // 2, down=4 * N)),
        # Masters, gradients and two moments are read and written.
        ({"stage": 3, **DISK}, "bf16", Copies(up=3 * N + N // 2, down=4 * N, disk=2 * 4 * N)),
    ],
)
def test_copies(wrap: dict[str, Any], compute: str, expected: Copies) -> None:
    assert share(wrap, compute=compute).copies(3) == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_divide_layers_shard_each_part_by_itself(stage: int) -> None:
    half = share({"stage": stage, **BUCKET}, ranks=4)
    pair = share({"stage": stage, **BUCKET, "tensor_parallel": TensorParallel(size=2)}, ranks=8)
    for event in ("between", "forward", "backward", "step"):
        assert at(pair, event, 1) == at(half, event, 1)
    told = list(zip(pair.traffic(2), half.traffic(2), strict=True))
    assert [(one.ranks, one.apart, one.bytes) for one, _ in told] == [
        (4, 2, other.bytes) for _, other in told
    ]


def test_a_second_copy_for_each_pair_of_ranks() -> None:
    """Wang et al. 2023, ZeRO++: from the first forward to the update, 2 N / 2 more in bf16; one
    gather among all ranks, the others among the pair."""
    name, asked = "second copy of parameters", {"plus_plus": PlusPlus(secondary_partition=2)}
    memory = share({"stage": 3, **BUCKET, **asked})
    events = ("between", "forward", "backward", "step")
    # Whole until backward: no copy. The last block, before a head of N / 4, is kept.
    assert [at(memory, event, 1, name=name) for event in events] == [0, 0, N // 4, N]
    assert [at(memory, event, 1, False, name=name) for event in events] == [0, N, N, N]
    few = {"stage": 3, "prefetch_bucket_size": 0, **asked}
    assert at(share(few), "forward", 1, name=name) == N
    assert at(share({**few, **BOTH}), "forward", 1, place="host", name=name) == N
    frozen = share({"stage": 3, **asked}, model(frozen={}))
    assert at(frozen, "between", name=name) == N  # no update makes that of frozen weights invalid
    gathers = [one for one in memory.traffic(3) if one.collective == "all-gather"]
    assert [(one.ranks, one.bytes) for one in gathers] == [(4, 2 * N), (2, 4 * N)]
    (plain,) = (
        one for one in share({"stage": 3, **BUCKET}).traffic(3) if "gather" in one.collective
    )
    assert (plain.ranks, plain.bytes) == (4, 6 * N)
