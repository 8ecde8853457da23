"""ZeRO's share of memory, traffic and copies, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts import Precision
from pipeline.planning.profile import NOTHING, Profile
from pipeline.planning.shapes import ModelShape, OptimizerShape, Weight
from pipeline.planning.strategy import Copies, Moment, StrategyMemory
from pipeline.planning.topology import Topology
from stages.wrap.zero import OptimizerOffload, ParameterOffload, Zero
from stages.wrap.zero.planner import ZeroPlanner

BILLION = 1_000_000_000
ADAMW = OptimizerShape(algorithm="adamw", bits=64, moments=2)
HOST = {"offload_optimizer": OptimizerOffload()}
BOTH = {**HOST, "offload_param": ParameterOffload()}
DISK = {"offload_optimizer": OptimizerOffload(device="nvme", path="/swap")}
N = 12_000_000
"""Elements of `model()`: two blocks of ten weights between the embeddings and a head as large."""


def model(
    *, blocks: int = 2, elements: int = N // 4, tied: bool = False, frozen: Any = None
) -> ModelShape:
    """Blocks of ten weights, embeddings and head of a block's size. `frozen`: fields of weights
    beside them in each block, twice the block's elements."""
    root = [Weight(name=name, shape=(elements,)) for name in ("embeddings", "head")[: 2 - tied]]
    block = [Weight(name=f"{number}", shape=(elements // 10,)) for number in range(10)]
    if frozen is not None:
        block.append(Weight(name="base", shape=(2 * elements,), trained=False, **frozen))
    return ModelShape(
        root=tuple(root), kinds=(tuple(block),), blocks=(0,) * blocks, late=(), tied=tied,
        vocabulary=elements, parameters=0, exported=0, proven=0,
    )  # fmt: skip


def share(
    wrap: dict[str, Any],
    shape: ModelShape | None = None,
    *,
    ranks: int = 4,
    optimizer: OptimizerShape = ADAMW,
    **policy: Any,
) -> StrategyMemory:
    """The share of a stage on a model, by default in bf16 with fp32 masters."""
    given = {"compute": "bf16", "master": "fp32", "reduce": "fp32", **policy}
    precision = Precision(buffer=None, loss_scaling=None, **given)
    parts = dict.fromkeys(
        ("start", "head", "loss", "loss_back", "head_back", "start_back"), NOTHING
    )
    profile = Profile(
        model=shape or model(), length=1, blocks=(), blocks_back=(), recomputed=(), **parts
    )
    topology = Topology(ranks=ranks, local_ranks=ranks, device="cuda")
    return ZeroPlanner(Zero(**wrap)).forecast(topology, profile, precision, optimizer)


def at(place: str, memory: StrategyMemory, *moment: Any, **how: Any) -> int:
    """Bytes held at a place, at a moment."""
    held = memory.held(Moment(*moment, **how))
    return sum(item.bytes for item in held if item.where == place)


def named(name: str, memory: StrategyMemory, *moment: Any, **how: Any) -> int:
    """Bytes of an item on the device, at a moment."""
    held = memory.held(Moment(*moment, **how))
    return sum(item.bytes for item in held if (item.where, item.name) == ("device", name))


BUCKET = {"reduce_bucket_size": 1000, "param_persistence_threshold": 0}
AGAIN = {"max_reuse_distance": 0, "prefetch_bucket_size": 0}
LOW = {"optimizer": OptimizerShape(algorithm="adamw8bit", bits=16.25, moments=2)}


@pytest.mark.parametrize(
    ("wrap", "how", "device", "host"),
    [
        # Rajbhandari et al. 2020, section 5: with 4 ranks, 2 N + 2 N + 12 N / 4 at stage 1, whose
        # class for bf16 keeps sums of gradients in fp32; at stage 2 those only from backward to
        # the step; at stage 3 16 N / 4, where they are in fp32 and there is a bucket, in fp32 too.
        ({"stage": 1}, {}, 2 * N + 4 * N + 3 * N, 0),
        ({"stage": 1}, {"compute": "fp16"}, 2 * N + 3 * N, 0),
        ({"stage": 2}, {}, 2 * N + 3 * N, 0),
        ({"stage": 2}, {"compute": "fp32"}, 4 * N + 3 * N, 0),
        ({"stage": 3, **BUCKET}, {}, (2 + 12 + 4) * N // 4 + 4000, 0),
        ({"stage": 3, **BUCKET}, {"reduce": "bf16"}, (2 + 12 + 4) * N // 4 + 2000, 0),
        # bf16 masters; moments in 8 bits, with a scale for each of their blocks.
        ({"stage": 2}, {"master": "bf16"} | LOW, 2 * N + round((2 + 16.25 / 8) * N / 4), 0),
        # Offloaded: masters, their gradients, two moments in fp32; updated weights, and a buffer
        # of the largest parameter on either side.
        ({"stage": 2, **HOST}, {}, 2 * N + N // 2, (12 + 4 + 2) * N // 4 + N // 2),
        ({"stage": 3, **BUCKET, **HOST}, {}, 2 * N // 4 + 4000, (12 + 4 + 4) * N // 4),
        ({"stage": 3, **BUCKET, **BOTH}, {}, 4000, (2 + 12 + 4 + 4) * N // 4),
        # On disk: masters, gradients, moments. Four buffers of a rank's whole part.
        ({"stage": 3, **BUCKET, **DISK}, {}, 2 * N // 4 + 4000, 4 * N // 4 + 4 * 4 * N // 4),
        # Frozen weights have no states; 4-bit ones are bytes.
        ({"stage": 2}, {"shape": model(frozen={})}, 5 * N + 2 * N, 0),
        ({"stage": 2}, {"shape": model(frozen={"packed": True})}, 5 * N + N, 0),
        ({"stage": 3, **BUCKET}, {"shape": model(frozen={})}, (18 + 2) * N // 4 + 4000, 0),
    ],
)  # fmt: skip
def test_states(wrap: dict[str, Any], how: dict[str, Any], device: int, host: int) -> None:
    memory = share(wrap, **how)
    assert at("device", memory, "between") == device
    assert at("host", memory, "between") == host
    on_disk = wrap.get("offload_optimizer") is DISK["offload_optimizer"]
    assert at("disk", memory, "between") == on_disk * (4 + 4 + 8) * N // 4


@given(stage=st.sampled_from([1, 2, 3]), ranks=st.integers(1, 600), blocks=st.integers(1, 9))
def test_parts_cover_all_and_become_smaller(stage: int, ranks: int, blocks: int) -> None:
    few, many = (share({"stage": stage}, model(blocks=blocks), ranks=w) for w in (ranks, ranks + 1))
    elements, place = few.masters
    assert N // 4 * (2 + blocks) <= elements * ranks < N // 4 * (2 + blocks) + ranks
    assert place == "device"
    assert ranks == 1 or at("device", many, "between") <= at("device", few, "between")
    for event in ("forward", "backward", "reduce"):
        first, later = (at("device", few, event, 0, first=turn) for turn in (True, False))
        assert at("device", few, "between") <= first <= later


@pytest.mark.parametrize(
    ("wrap", "each"),
    [({"stage": 2}, 2), ({"stage": 2, "overlap_comm": True}, 4), ({"stage": 3}, 4)],
)
def test_the_reduce_bucket_is_allocated_whole(wrap: dict[str, Any], each: int) -> None:
    assert named("reduce bucket", share(wrap), "backward", 0) == each * BILLION // 2


def test_stage_2_has_a_part_of_gradients_from_the_first_reduction_on() -> None:
    memory = share({"stage": 2, "reduce_bucket_size": 4_000_000})  # more than the head's
    units = ("head", 1, 0, "embeddings")
    parts = [named("gradients", memory, "backward", unit) for unit in units]
    assert parts == [0, 0, N, N]
    assert [named("gradients", memory, "forward", 0, first=turn) for turn in (True, False)] == [
        0,
        N,
    ]
    # The head and a third of the block are sent in fp32, flattened before in bf16, while a tenth
    # of the block waits.
    more = at("device", memory, "reduce", 1) - at("device", memory, "regather", 1)
    assert more == N + (2 + 4) * 4_000_000 + 2 * 300_000


def test_stage_3_gathers_until_the_limit_of_live_parameters() -> None:
    """1e9 elements are whole; a fetch of 5e7 and a weight of 8e7 is in a buffer beside them."""
    memory = share({"stage": 3}, model(blocks=80, elements=800_000_000), ranks=64)
    found = [named("parameters in use", memory, "forward", unit) for unit in (40, 79, "head")]
    assert found == [2 * 1_130_000_000, 2 * 1_800_000_000, 2 * BILLION]  # with the head at the end
    assert named("parameters in use", memory, "regather", "embeddings") == 2 * 800_000_000


def test_a_small_model_stays_whole_from_forward_to_backward() -> None:
    memory = share({"stage": 3, **BUCKET})
    units = [("forward", 1), ("regather", 1), ("regather", "embeddings"), ("between", "head")]
    found = [named("parameters in use", memory, *unit) // (N // 4) for unit in units]
    # In forward all are in a buffer too; in backward the head is done.
    assert found == [2 * (4 + 4), 2 * 3, 2 * 1, 0]


def test_one_rank_gathers_nothing() -> None:
    memory = share({"stage": 3}, ranks=1)
    assert at("device", memory, "forward", 1) == at("device", memory, "between")
    assert not [*memory.traffic(1)]


def test_a_tied_heads_gradient_waits_for_that_of_the_embeddings() -> None:
    wrap = {"stage": 2, "reduce_bucket_size": 5000}
    tied, untied = share(wrap, model(tied=True)), share(wrap)
    for unit in (1, 0, "embeddings"):
        assert named("gradient of the tied head", tied, "backward", unit) == 2 * N // 4
        assert named("gradient of the tied head", untied, "backward", unit) == 0


@pytest.mark.parametrize(
    ("wrap", "policy", "taken", "more"),
    [
        # Gradients in fp32, and norms of the largest weight in fp64, or what the kernel takes.
        ({"stage": 2}, {}, 0, N + 8 * N // 4),
        ({"stage": 2}, {}, 12, N + 12 * N // 4),
        ({"stage": 2}, {"master": "bf16"}, 12, N + (2 + 12) * N // 4),
        ({"stage": 3, "sub_group_size": N // 8}, {}, 12, (4 + 12) * (N // 8 + N // 16)),
    ],
)
def test_an_update_takes_what_its_kernel_takes(
    wrap: dict[str, Any], policy: dict[str, Any], taken: float, more: int
) -> None:
    optimizer = OptimizerShape(algorithm="lion", bits=32, moments=1, taken=taken)
    memory = share({**wrap, **BUCKET}, optimizer=optimizer, **policy)
    assert at("device", memory, "step") - at("device", memory, "between") == more


@pytest.mark.parametrize(
    ("wrap", "gradients", "parameters"),
    [
        ({"stage": 1}, ("all-reduce", 4 * N), 2 * N),
        ({"stage": 2}, ("all-reduce", 3 * 4 * N), 2 * N),
        ({"stage": 3}, ("reduce-scatter", 3 * 4 * N), 3 * 2 * N),
        ({"stage": 3, **AGAIN}, ("reduce-scatter", 3 * 4 * N), 2 * 3 * 2 * N),
        # Small ones are gathered after the update.
        ({"stage": 3, "param_persistence_threshold": N}, ("reduce-scatter", 12 * N), 2 * N),
    ],
)
def test_traffic(wrap: dict[str, Any], gradients: tuple[str, int], parameters: int) -> None:
    told = [(one.collective, one.bytes, one.ranks) for one in share(wrap).traffic(3)]
    assert told == [(*gradients, 4), ("all-gather", parameters, 4)]


@pytest.mark.parametrize(
    ("wrap", "compute", "expected"),
    [
        ({"stage": 1}, "bf16", Copies()),
        # Gradients are summed on the device, in fp32; updated weights go up in bf16.
        ({"stage": 2, **HOST}, "bf16", Copies(up=2 * N // 4, down=N)),
        # In fp32 they are summed in host memory: three times down, twice up.
        ({"stage": 2, **HOST}, "fp32", Copies(up=N + 2 * N, down=N + 3 * N)),
        # Stage 3 sums in host memory: up and down for each micro-batch, then to the masters.
        ({"stage": 3, **HOST}, "bf16", Copies(up=3 * N + N // 2, down=4 * N)),
        # Parameters are read whenever they are gathered, updates are on the host.
        ({"stage": 3, **BOTH}, "bf16", Copies(up=3 * N + 3 * N // 2, down=4 * N)),
        # Masters, gradients and two moments are read and written.
        ({"stage": 3, **DISK}, "bf16", Copies(up=3 * N + N // 2, down=4 * N, disk=2 * 4 * N)),
    ],
)
def test_copies(wrap: dict[str, Any], compute: str, expected: Copies) -> None:
    assert share(wrap, compute=compute).copies(3) == expected
