"""Traffic, waiting and passes of models that ranks divide, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memories.cases import Case, llama, own
from memories.compare import job

from pipeline.planning.estimate import Estimate, ask_planners, combine
from pipeline.planning.trace.profiling import profile
from stages.wrap.fsdp_stages import idle_shares, passes_of

TOKENS, HIDDEN, BLOCKS = 192, 256, 4


def case(**strategy: Any) -> Case:
    ranks = 8 if strategy.pop("more", False) else 2
    fields = {"ranks": ranks, "length": TOKENS, "accumulation": strategy.pop("accumulation", 1)}
    return Case(name="", model=own(**llama()), strategy=strategy, **fields)


def forecast(one: Case, folder: Path) -> Estimate:
    here = job(one, folder, "cuda")
    return combine(here.topology, ask_planners(here, profile(here)))


def test_what_divided_layers_exchange_by_hand(tmp_path: Path) -> None:
    """Hidden states in bf16: two sums in each direction of each block (Shoeybi et al. 2019), one of
    the embedding forward, one of the head backward; three numbers of fp32 a token of the loss."""
    one = case(tensor_parallel={"size": 2, "sequence": False})
    (sums,) = (t for t in forecast(one, tmp_path).traffic if t.waits)
    hidden = TOKENS * HIDDEN * 2
    micro = 2  # samples of a step, on one data-parallel rank
    assert (sums.collective, sums.ranks, sums.apart) == ("all-reduce", 2, 1)
    assert sums.bytes == micro * (hidden * (4 * BLOCKS + 2) + 3 * 4 * TOKENS)


def test_what_divided_samples_exchange_by_hand(tmp_path: Path) -> None:
    """In each block and direction, queries, keys, values and outputs of a rank's tokens (Jacobs et
    al. 2023)."""
    found = forecast(case(context_parallel={"size": 2}), tmp_path).traffic
    (exchanged,) = (one for one in found if one.waits)
    width = 2 * HIDDEN + 2 * HIDDEN // 2
    assert exchanged.collective == "all-to-all"
    assert exchanged.bytes == 2 * 2 * BLOCKS * (TOKENS // 2) * width * 2


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
