"""Memory of FSDP, DDP and averages: by hand, next to the oracle, and its direction of growth; and
traffic, waiting and passes of models that ranks divide, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memories import cases
from memories.cases import DORA, EAGER, GRADIENTS_ONLY, HYBRID, LATE, NARROW, Case, hub, llama, own
from memories.compare import job, profile_and_trace

from pipeline import planning
from pipeline.contracts.optimizer import Precision
from pipeline.planning.estimate import AVERAGE, Estimate, ask_planners, combine, step_peaks
from pipeline.planning.forecast import Held, Line, Moment, Part, Peak, Profile, StrategyMemory
from pipeline.planning.shapes import ModelShape, OptimizerShape, Topology, Weight
from pipeline.planning.trace.profiling import profile as profile_of
from stages.average.ema import EmaAverage
from stages.planners import EmaPlanner
from stages.wrap.axes import axis_sizes
from stages.wrap.ddp import Ddp
from stages.wrap.fsdp import Fsdp
from stages.wrap.fsdp_planner import FsdpPlanner, idle_shares, passes_of
from stages.wrap.torch_planner import DdpPlanner
from tests.support.strategies import STRATEGIES
from tests.support.tier import examples, spread

PLANNERS: Mapping[type, Any] = {Ddp: DdpPlanner, Fsdp: FsdpPlanner}
ADAM = OptimizerShape(algorithm="adamw", bits=64, moments=2)
EVERY = [one.stage() for one in STRATEGIES.values() if one.use in ("wrap.ddp", "wrap.fsdp")]
WRAPS = [*(one for one in EVERY if not axis_sizes(one)), Ddp(gradient_as_bucket_view=False)]
"""Strategies under which every rank has the whole model."""
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
    held = peaks(profile, share(wrap, profile, ranks))[planning.UPDATE].items
    states = planning.PARAMETERS, planning.GRADIENTS, planning.OPTIMIZER
    assert held == dict(zip(states, (4 * each, 4 * each, 8 * each), strict=True))


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
    assert found[planning.SAVE].items[AVERAGE] == 4 * elements
    assert plain.averaged == 0


BOUND = 0.05
"""Largest error against the oracle, as of `benchmarks/memory.py`."""
WIDE = llama(vocab_size=32000)
MOE = own(**llama(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2))
DEEP = llama(num_hidden_layers=8)
ZERO_BUBBLE = {"sharding": "shard_grad_op"}


def tensor(size: int, **fields: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"size": size, **fields}}


def staged(size: int, schedule: str = "1F1B") -> dict[str, Any]:
    return {"pipeline_parallel": {"size": size, "schedule": schedule}}


CONTEXT = {size: {"context_parallel": {"size": size}} for size in (2, 4)}
EXPERTS = {size: {"expert_parallel": {"size": size}} for size in (2, 4)}
BLOCKS: dict[str, dict[str, Any]] = {
    "accumulated": {"wrap": "ddp", "accumulation": 2},
    "gradients of their own": {
        "wrap": "ddp", "accumulation": 2, "reduce": "bf16",
        "strategy": {"gradient_as_bucket_view": False},
    },
    "gradients that are freed": {
        "wrap": "ddp", "accumulation": 2, "strategy": {"find_unused_parameters": True},
    },
    "whole gradients": {"ranks": 16, "strategy": LATE, "accumulation": 3, "reduce": "bf16"},
    "kept after forward": {"ranks": 4, "strategy": GRADIENTS_ONLY, "samples": 2},
    "shards of replicas": {"ranks": 16, "strategy": HYBRID | {"shard_size": 2}, "reduce": "bf16"},
    "ahead": {"ranks": 4, "strategy": AHEAD},
    "offloaded": {"ranks": 4, "strategy": {"cpu_offload": True}},
    "DoRA, FSDP": {"ranks": 4, "adapter": DORA},
    "DoRA, DDP": {"wrap": "ddp", "ranks": 4, "adapter": DORA},
    "8 bits": {"ranks": 2, "optimizer": NARROW, "master": "bf16"},
    "4 bits": {"ranks": 2, "adapter": {"rank": 8, "quantize": "nf4"}},
    "not compiled": {"ranks": 2, "optimizer": {"moments": "8bit", "kernel": "single"}},
    "attention kept": {
        "wrap": "ddp", "model": {"activation_checkpointing": {"keep": "attention"}},
    },
    "attention kept, compiled": {
        "wrap": "ddp",
        "model": {"activation_checkpointing": {"keep": "attention"}, "compile": {}},
    },
    "compiled": {"wrap": "ddp", "model": {"compile": {}}},
}  # fmt: skip
ENDS: dict[str, dict[str, Any]] = {
    "full": {},
    "in chunks": {"chunk": 64, "length": 256},
    "grad op": {"strategy": GRADIENTS_ONLY},
    "hybrid": {"strategy": HYBRID | {"shard_size": 2}},
    "once a step": {"strategy": LATE, "accumulation": 3},
    "accumulated by FSDP": {"accumulation": 3},
    "named units": {"strategy": {"units": ["LlamaDecoderLayer"]}},
    "no shards": {"strategy": {"sharding": "no_shard"}},
    "narrow": {"reduce": "bf16"},
    "LoRA": {"adapter": {"rank": 8}},
    "tied": {"model": own(**WIDE | {"tie_word_embeddings": True})},
    "alone, accumulated": {"ranks": 1, "accumulation": 2},
}
DIVIDED: dict[str, dict[str, Any]] = {
    "tensor 2": {"strategy": tensor(2)},
    "tensor 4": {"strategy": tensor(4)},
    "tensor 2, whole": {"strategy": tensor(2, sequence=False)},
    "tensor 2, in chunks": {"strategy": tensor(2), "chunk": 64},
    "tensor 2, again": {"strategy": tensor(2), "model": own(1, **llama())},
    "tensor 2, LoRA": {"strategy": tensor(2), "adapter": {"rank": 8}},
    "context 2": {"strategy": CONTEXT[2]},
    "context 2, packed": {"strategy": CONTEXT[2], "packed": True},
    "context 4, packed": {"strategy": CONTEXT[4], "packed": True},
    "context 2, DDP": {"strategy": CONTEXT[2], "wrap": "ddp"},
    "tensor 2, context 2": {"strategy": tensor(2) | CONTEXT[2], "ranks": 8},
    "experts 2": {"strategy": EXPERTS[2], "model": MOE},
    "experts 4": {"strategy": EXPERTS[4], "model": MOE},
    "experts 2, once a step": {"strategy": EXPERTS[2] | LATE, "model": MOE, "accumulation": 3},
    "experts 4, context 2": {"strategy": EXPERTS[4] | CONTEXT[2], "model": MOE},
    "stages, experts 2": {
        "strategy": EXPERTS[2] | staged(2), "model": MOE, "accumulation": 4, "ranks": 8,
    },
    "1F1B": {"strategy": staged(2), "accumulation": 4},
    "GPipe": {"strategy": staged(2, "GPipe"), "accumulation": 2},
    "1F1B, 4 stages": {"strategy": staged(4), "accumulation": 4, "model": own(**DEEP)},
    "interleaved": {"strategy": staged(2, "Interleaved1F1B"), "accumulation": 4},
    "breadth first": {"strategy": staged(2, "LoopedBFS"), "accumulation": 2},
    **{
        f"{schedule} {ranks}, {compute}": {
            "strategy": staged(ranks, schedule) | ZERO_BUBBLE, "accumulation": 8,
            "model": own(**DEEP), "compute": compute,
        }
        for schedule, ranks, compute in (
            ("InterleavedZeroBubble", 2, "fp32"), ("InterleavedZeroBubble", 4, "bf16"),
            ("ZBVZeroBubble", 2, "bf16"), ("ZBVZeroBubble", 4, "bf16"),
        )
    },
    "stages, again": {"strategy": staged(2), "accumulation": 4, "model": own(1, **DEEP)},
    "stages, packed": {"strategy": staged(2), "accumulation": 4, "packed": True},
    "stages, tied": {
        "strategy": staged(2), "accumulation": 4, "model": own(**llama(tie_word_embeddings=True)),
    },
    "stages, tensor 2": {"strategy": staged(2) | tensor(2), "accumulation": 2, "ranks": 8},
    "stages, context 2": {"strategy": staged(2) | CONTEXT[2], "accumulation": 2, "ranks": 8},
}  # fmt: skip
LARGE = {name: DIVIDED[name] for name in ("tensor 2", "context 2", "1F1B")}
QUICK = ("context 2, packed", "experts 2", "1F1B")


def apart(**fields: Any) -> float:
    """Return the relative difference between forecast and oracle."""
    return abs(profile_and_trace(Case(name="", **fields)).error)


@pytest.mark.parametrize("name", spread(list(BLOCKS), 2))
def test_blocks_take_what_the_oracle_takes(name: str) -> None:
    fields = {"model": EAGER, **BLOCKS[name]}
    fields["model"] = own(1, **llama(vocab_size=8000)) | fields["model"]
    assert apart(**{"length": 128, "ranks": 2, **fields}) < BOUND


@pytest.mark.parametrize("name", spread(list(ENDS), 3))
def test_embeddings_and_heads_take_what_the_oracle_takes(name: str) -> None:
    assert apart(**{"model": own(**WIDE), "ranks": 4, "length": 64, **ENDS[name]}) < BOUND


@pytest.mark.parametrize("name", dict.fromkeys([*QUICK, *spread(list(DIVIDED), 1)]))
def test_one_ranks_part_takes_what_the_oracle_takes(name: str) -> None:
    assert apart(**{"model": own(**llama()), "ranks": 4, "length": 192, **DIVIDED[name]}) < BOUND


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE)
def test_a_wide_model_too(name: str) -> None:
    assert apart(model=hub(cases.LLAMA_1B, again=1), ranks=4, length=192, **LARGE[name]) < BOUND


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


TOKENS, HIDDEN, LAYERS = 192, 256, 4


def case(**strategy: Any) -> Case:
    ranks = 8 if strategy.pop("more", False) else 2
    fields = {"ranks": ranks, "length": TOKENS, "accumulation": strategy.pop("accumulation", 1)}
    return Case(name="", model=own(**llama()), strategy=strategy, **fields)


def forecast(one: Case, folder: Path) -> Estimate:
    here = job(one, folder, "cuda")
    return combine(here.topology, ask_planners(here, profile_of(here)))


def test_what_divided_layers_exchange_by_hand(tmp_path: Path) -> None:
    """Hidden states in bf16: two sums in each direction of each block (Shoeybi et al. 2019), one of
    the embedding forward, one of the head backward; three numbers of fp32 a token of the loss."""
    one = case(tensor_parallel={"size": 2, "sequence": False})
    (sums,) = (t for t in forecast(one, tmp_path).traffic if t.waits)
    hidden = TOKENS * HIDDEN * 2
    micro = 2  # samples of a step, on one data-parallel rank
    assert (sums.collective, sums.ranks, sums.apart) == ("all-reduce", 2, 1)
    assert sums.bytes == micro * (hidden * (4 * LAYERS + 2) + 3 * 4 * TOKENS)


def test_what_divided_samples_exchange_by_hand(tmp_path: Path) -> None:
    """In each block and direction, queries, keys, values and outputs of a rank's tokens (Jacobs et
    al. 2023)."""
    found = forecast(case(context_parallel={"size": 2}), tmp_path).traffic
    (exchanged,) = (one for one in found if one.waits)
    width = 2 * HIDDEN + 2 * HIDDEN // 2
    assert exchanged.collective == "all-to-all"
    assert exchanged.bytes == 2 * 2 * LAYERS * (TOKENS // 2) * width * 2


def test_stages_pass_hidden_states_on(tmp_path: Path) -> None:
    found = forecast(
        case(pipeline_parallel={"size": 2, "schedule": "1F1B"}, accumulation=2), tmp_path
    )
    (sent,) = (one for one in found.traffic if one.collective == "send")
    assert sent.bytes == 4 * TOKENS * HIDDEN * 2
    assert found.work.idle == pytest.approx(1 / (4 + 1))


def test_samples_are_divided_among_data_parallel_ranks(tmp_path: Path) -> None:
    here = job(case(tensor_parallel={"size": 2}, more=True), tmp_path, "cuda")
    assert here.topology.data_ranks == 4
    assert here.step is not None
    assert (here.step.microbatches, here.step.of_rank) == (2, 2)


@given(st.integers(1, 8), st.integers(1, 24), st.sampled_from(["GPipe", "1F1B"]))
def test_the_bubble_of_simple_schedules(ranks: int, count: int, schedule: str) -> None:
    """Narayanan et al. 2021, section 2.2."""
    count, orders = passes_of(schedule, ranks, 1, count)
    expected = (ranks - 1) / (count + ranks - 1)
    assert idle_shares(orders, ranks) == pytest.approx([expected] * ranks)


@pytest.mark.parametrize(
    ("schedule", "least"),
    [("Interleaved1F1B", 3 / 19), ("LoopedBFS", 3 / 19), ("ZBVZeroBubble", 1 / 17)],
)
def test_several_stages_a_rank_wait_less(schedule: str, least: float) -> None:
    _, orders = passes_of(schedule, 4, 2, 8)
    assert idle_shares(orders, 8) == pytest.approx([least] * 4)
