"""Memory of FSDP, DDP and averages: by hand, beside traces, and its direction of growth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memories.cases import DORA, EAGER, NARROW, Case, llama, own
from memories.compare import profile_and_trace

from pipeline.contracts.precision import Precision
from pipeline.planning.forecast import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    SAVE,
    UPDATE,
    Held,
    Moment,
    StrategyMemory,
)
from pipeline.planning.profile import Line, Part, Peak, Profile
from pipeline.planning.shapes import ModelShape, OptimizerShape, Topology, Weight
from pipeline.planning.walk import AVERAGE, step_peaks
from stages.average.ema import EmaAverage
from stages.planners import EmaPlanner
from stages.wrap.axes import axis_sizes
from stages.wrap.ddp import Ddp
from stages.wrap.fsdp import Fsdp
from stages.wrap.fsdp_planner import FsdpPlanner
from stages.wrap.torch_planner import DdpPlanner
from tests.support.strategies import STRATEGIES
from tests.support.tier import examples, spread

PLANNERS: Mapping[type, Any] = {Ddp: DdpPlanner, Fsdp: FsdpPlanner}
ADAM = OptimizerShape(algorithm="adamw", bits=64, moments=2)
EVERY = [one.stage() for one in STRATEGIES.values() if one.use in ("wrap.ddp", "wrap.fsdp")]
WRAPS = [*(one for one in EVERY if not axis_sizes(one)), Ddp(gradient_as_bucket_view=False)]
"""Strategies under which every rank has the whole model."""
LATE = {"reduce_every_microbatch": False}
AHEAD = {"forward_prefetch": 1, "backward_prefetch": 2}


def policy(compute: str = "bf16", reduce: str = "fp32") -> Precision:
    return Precision(
        master="fp32", compute=compute, reduce=reduce, buffer=None, loss_scaling=None  # type: ignore[arg-type]
    )  # fmt: skip


def model(blocks: int, rows: int, words: int, again: bool = False) -> Profile:
    """Return the profile of blocks of one matrix between two tables. A sample takes 1000 bytes of
    each part for backward, or of each block while it runs."""
    hidden = 64
    head = Weight(name="head", shape=(words, hidden))
    shape = ModelShape(
        root=(Weight(name="table", shape=(words, hidden)), head),
        kinds=((Weight(name="block", shape=(rows, hidden)),),),
        blocks=(0,) * blocks,
        late=("head",),
        tied=False,
        vocabulary=words,
        parameters=(2 * words + rows * blocks) * hidden,
        exported=0,
        proven=0,
    )
    kept, taken = (100, 1000) if again else (1000, 1000)
    forward = Part(kept=Line(0, kept), peaks=(Peak(Line(0, taken)),))
    block = Part(kept=Line(0, -kept), peaks=(Peak(Line(0, taken), rows * hidden, rows * hidden),))
    last = Part(kept=Line(0, -1000), peaks=(Peak(Line(0, 1000), words * hidden, words * hidden),))
    parts = {
        "forward 0": forward,
        "loss head": Part(kept=Line(0, 1000)),
        "backward head": last,
        "backward 0": block,
        "backward embeddings": Part(peaks=last.peaks),
    }
    return Profile(model=shape, parts=parts, recomputed=(again,))


def share(wrap: Any, profile: Profile, ranks: int, compute: str = "bf16") -> StrategyMemory:
    topology = Topology(ranks=ranks, local_ranks=min(ranks, 8), device="cuda")
    found: StrategyMemory = PLANNERS[type(wrap)](wrap).forecast(
        topology, profile, policy(compute), ADAM
    )
    return found


def peaks(profile: Profile, strategy: StrategyMemory, **how: int) -> dict[str, Held]:
    return step_peaks(profile, strategy, **{"samples": 1, "microbatches": 1, **how})["both"]


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    ("wrap", "sharded"), [(Ddp(), False), (Fsdp(), True), (Fsdp(sharding="shard_grad_op"), True)]
)
def test_states_are_those_of_the_zero_paper(wrap: Any, sharded: bool, ranks: int) -> None:
    """The paper is Rajbhandari et al. 2020: 4 bytes of a weight, 4 of its gradient, 8 of Adam's
    moments; stage 3 shards all of it."""
    profile = model(blocks=4, rows=512, words=1024)
    each = (2 * 1024 + 4 * 512) * 64 // (ranks if sharded else 1)
    held = peaks(profile, share(wrap, profile, ranks))[UPDATE].items
    assert held == {PARAMETERS: 4 * each, GRADIENTS: 4 * each, OPTIMIZER: 8 * each}


def test_a_block_in_backward_by_hand() -> None:
    """The moment is the reduction of the second of 4 blocks, with FSDP in bf16 on 8 ranks. Held
    are: shards, and the gradient shards of two blocks; the root, gathered; the first block,
    gathered ahead; gradients of the head and the block; the buffer that is reduced, in fp32."""
    profile = model(blocks=4, rows=4096, words=64)
    root, head, block = 2 * 64 * 64, 64 * 64, 4096 * 64
    shards = 12 * (root + 4 * block) // 8 + 4 * 2 * block // 8
    held = share(Fsdp(), profile, 8).held(Moment("reduce", 1))
    whole = 2 * root + 2 * block + 2 * (head + block) + 4 * block
    assert sum(item.bytes for item in held) == shards + whole


@pytest.mark.parametrize("wrap", [Fsdp(), Fsdp(cpu_offload=True), Ddp()])
def test_an_average_is_four_bytes_of_what_a_rank_updates(wrap: Any) -> None:
    profile = model(blocks=4, rows=512, words=1024)
    plain = share(wrap, profile, 4)
    topology = Topology(ranks=4, local_ranks=4, device="cuda")
    averaged = EmaPlanner(EmaAverage()).forecast(topology, plain)
    elements, place = averaged.masters
    assert elements == profile.model.trained // (1 if isinstance(wrap, Ddp) else 4)
    found = step_peaks(profile, averaged, samples=1, microbatches=1)[place]
    assert found[SAVE].items[AVERAGE] == 4 * elements
    assert plain.averaged == 0


KEPT = {"keep": "attention"}
CASES: dict[str, dict[str, Any]] = {
    "accumulated": {"wrap": "ddp", "accumulation": 2},
    "gradients of their own": {
        "wrap": "ddp", "accumulation": 2, "reduce": "bf16",
        "strategy": {"gradient_as_bucket_view": False},
    },
    "gradients that are freed": {
        "wrap": "ddp", "accumulation": 2, "strategy": {"find_unused_parameters": True},
    },
    "whole gradients": {"ranks": 16, "strategy": LATE, "accumulation": 3, "reduce": "bf16"},
    "kept after forward": {"ranks": 4, "strategy": {"sharding": "shard_grad_op"}, "samples": 2},
    "shards of replicas": {
        "ranks": 16, "strategy": {"sharding": "hybrid_shard", "shard_size": 2}, "reduce": "bf16",
    },
    "ahead": {"ranks": 4, "strategy": AHEAD},
    "offloaded": {"ranks": 4, "strategy": {"cpu_offload": True}},
    "DoRA, FSDP": {"ranks": 4, "adapter": DORA},
    "DoRA, DDP": {"wrap": "ddp", "ranks": 4, "adapter": DORA},
    "8 bits": {"ranks": 2, "optimizer": NARROW, "master": "bf16"},
    "4 bits": {"ranks": 2, "adapter": {"rank": 8, "quantize": "nf4"}},
    "not compiled": {"ranks": 2, "optimizer": {"moments": "8bit", "kernel": "single"}},
    "attention kept": {"wrap": "ddp", "model": {"activation_checkpointing": KEPT}},
    "attention kept, compiled": {
        "wrap": "ddp", "model": {"activation_checkpointing": KEPT, "compile": {}},
    },
    "compiled": {"wrap": "ddp", "model": {"compile": {}}},
}  # fmt: skip


@pytest.mark.parametrize("name", spread(list(CASES), 2))
def test_what_is_told_is_what_a_trace_says(name: str) -> None:
    sized: dict[str, Any] = {"length": 128, "ranks": 2, "model": EAGER, **CASES[name]}
    sized["model"] = own(1, **llama(vocab_size=8000)) | sized["model"]
    assert abs(profile_and_trace(Case(name=name, **sized)).error) < 0.05


profiles = st.builds(
    model,
    blocks=st.integers(1, 8),
    rows=st.integers(1, 64).map(lambda n: n * 64),
    words=st.integers(1, 64).map(lambda n: n * 64),
    again=st.booleans(),
)
dtypes = st.sampled_from(["bf16", "fp32"])
ways = {"profile": profiles, "wrap": st.sampled_from(WRAPS), "compute": dtypes}


@examples(60)
@given(**ways, ranks=st.sampled_from([2, 4, 8]), turns=st.integers(1, 3))
def test_more_ranks_never_need_more_of_each(
    profile: Profile, wrap: Any, compute: str, ranks: int, turns: int
) -> None:
    few, many = (
        peaks(profile, share(wrap, profile, number, compute), microbatches=turns)
        for number in (ranks, 2 * ranks)
    )
    assert all(many[phase].bytes <= few[phase].bytes for phase in few)


@examples(60)
@given(**ways, samples=st.integers(1, 100), turns=st.integers(1, 2))
def test_larger_batches_and_deeper_models_never_need_less(
    profile: Profile, wrap: Any, compute: str, samples: int, turns: int
) -> None:
    def needed(of: Profile, samples: int, turns: int) -> dict[str, Held]:
        return peaks(of, share(wrap, of, 4, compute), samples=samples, microbatches=turns)

    plain = needed(profile, samples, turns)
    blocks = (*profile.model.blocks, 0)
    deeper = replace(profile, model=replace(profile.model, blocks=blocks))
    for larger in ((profile, samples + 1, turns), (profile, samples, turns + 1),
                   (deeper, samples, turns)):  # fmt: skip
        more = needed(*larger)
        assert all(more[phase].bytes >= plain[phase].bytes for phase in plain)
