"""Plans of models that ranks divide: memory beside traces, traffic and waiting by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from memories.cases import LLAMA_1B, LLAMA_8B, LLAMA_70B, Case, hub, llama, own
from memories.compare import job, step_peak
from memories.oracle import step_peaks

from pipeline.cli import main
from pipeline.planning.estimate import Estimate, ask_planners, combine
from pipeline.planning.trace.profiling import profile
from stages.wrap.fsdp_stages import idle_shares, passes_of
from tests.support.tier import spread

TOKENS, HIDDEN, BLOCKS, WORDS = 192, 256, 4, 4000
CLOSE = 0.03


def tensor(size: int, **fields: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"size": size, **fields}}


def context(size: int) -> dict[str, Any]:
    return {"context_parallel": {"size": size}}


def staged(size: int, schedule: str = "1F1B") -> dict[str, Any]:
    return {"pipeline_parallel": {"size": size, "schedule": schedule}}


EXPERTS = own(**llama(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2))
DEEP = llama(num_hidden_layers=8)
CASES: dict[str, dict[str, Any]] = {
    "tensor 2": {"strategy": tensor(2)},
    "tensor 4": {"strategy": tensor(4)},
    "tensor 2, whole": {"strategy": tensor(2, sequence=False)},
    "tensor 4, whole": {"strategy": tensor(4, sequence=False)},
    "tensor 2, in chunks": {"strategy": tensor(2), "chunk": 64},
    "tensor 2, again": {"strategy": tensor(2), "model": own(1, **llama())},
    "tensor 2, LoRA": {"strategy": tensor(2), "adapter": {"rank": 8}},
    "context 2": {"strategy": context(2)},
    "context 4": {"strategy": context(4)},
    "context 2, packed": {"strategy": context(2), "packed": True},
    "context 4, packed": {"strategy": context(4), "packed": True},
    "context 2, DDP": {"strategy": context(2), "wrap": "ddp"},
    "tensor 2, context 2": {"strategy": tensor(2) | context(2), "ranks": 8},
    "experts 2": {"strategy": {"expert_parallel": {"size": 2}}, "model": EXPERTS},
    "experts 4": {"strategy": {"expert_parallel": {"size": 4}}, "model": EXPERTS},
    "experts 2, once a step": {
        "strategy": {"expert_parallel": {"size": 2}, "reduce_every_microbatch": False},
        "model": EXPERTS, "accumulation": 3,
    },
    "experts 4, context 2": {
        "strategy": {"expert_parallel": {"size": 4}, **context(2)}, "model": EXPERTS,
    },
    "stages, experts 2": {
        "strategy": {"expert_parallel": {"size": 2}, **staged(2)}, "model": EXPERTS,
        "accumulation": 4, "ranks": 8,
    },
    "1F1B": {"strategy": staged(2), "accumulation": 4},
    "GPipe": {"strategy": staged(2, "GPipe"), "accumulation": 2},
    "1F1B, 4 stages": {"strategy": staged(4), "accumulation": 4, "model": own(**DEEP)},
    "interleaved": {"strategy": staged(2, "Interleaved1F1B"), "accumulation": 4},
    "breadth first": {"strategy": staged(2, "LoopedBFS"), "accumulation": 2},
    **{
        f"{schedule} {ranks}": {
            "strategy": staged(ranks, schedule) | {"sharding": "shard_grad_op"},
            "accumulation": 8, "model": own(**DEEP),
        }
        for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble")
        for ranks in (2, 4)
    },
    "InterleavedZeroBubble 2, fp32": {
        "strategy": staged(2, "InterleavedZeroBubble") | {"sharding": "shard_grad_op"},
        "accumulation": 8, "model": own(**DEEP), "compute": "fp32",
    },
    "stages, again": {"strategy": staged(2), "accumulation": 4, "model": own(1, **DEEP)},
    "stages, packed": {"strategy": staged(2), "accumulation": 4, "packed": True},
    "stages, tied": {
        "strategy": staged(2), "accumulation": 4, "model": own(**llama(tie_word_embeddings=True)),
    },
    "stages, tensor 2": {"strategy": staged(2) | tensor(2), "accumulation": 2, "ranks": 8},
    "stages, context 2": {"strategy": staged(2) | context(2), "accumulation": 2, "ranks": 8},
}  # fmt: skip
QUICK = ("tensor 2", "context 2, packed", "experts 2", "1F1B")
WIDE = {
    "tensor 2": {"strategy": tensor(2)},
    "context 2": {"strategy": context(2)},
    "stages": {"strategy": staged(2), "accumulation": 4},
}


def case(model: Any = None, **fields: Any) -> Case:
    settings = {"ranks": 4, "length": TOKENS} | fields
    return Case(name="", model=model or own(**llama()), **settings)


def forecast(one: Case, folder: Path) -> Estimate:
    here = job(one, folder, "cuda")
    return combine(here.topology, ask_planners(here, profile(here)))


def apart(one: Case, folder: Path) -> float:
    """Return the relative difference between forecast and trace."""
    told = step_peak(forecast(one, folder).device)
    return told / step_peak(step_peaks(job(one, folder, "cuda"))) - 1


@pytest.mark.parametrize("name", dict.fromkeys([*QUICK, *spread([*CASES], 1)]))
def test_one_ranks_part_takes_what_a_trace_takes(name: str, tmp_path: Path) -> None:
    assert abs(apart(case(**CASES[name]), tmp_path)) < CLOSE


@pytest.mark.full
@pytest.mark.parametrize("name", WIDE)
def test_a_wide_model_too(name: str, tmp_path: Path) -> None:
    assert abs(apart(case(hub(LLAMA_1B, again=1), **WIDE[name]), tmp_path)) < CLOSE


def test_what_divided_layers_exchange_by_hand(tmp_path: Path) -> None:
    """Hidden states in bf16: two sums in each direction of each block (Shoeybi et al. 2019), one of
    the embedding forward, one of the head backward; three numbers of fp32 a token of the loss."""
    one = case(strategy=tensor(2, sequence=False), ranks=2)
    (sums,) = (t for t in forecast(one, tmp_path).traffic if t.waits)
    hidden = TOKENS * HIDDEN * 2
    micro = 2  # samples of a step, on one data-parallel rank
    assert (sums.collective, sums.ranks, sums.apart) == ("all-reduce", 2, 1)
    assert sums.bytes == micro * (hidden * (4 * BLOCKS + 2) + 3 * 4 * TOKENS)


def test_what_divided_samples_exchange_by_hand(tmp_path: Path) -> None:
    """In each block and direction, queries, keys, values and outputs of a rank's tokens (Jacobs et
    al. 2023)."""
    found = forecast(case(strategy=context(2), ranks=2), tmp_path).traffic
    (exchanged,) = (one for one in found if one.waits)
    width = 2 * HIDDEN + 2 * HIDDEN // 2
    assert exchanged.collective == "all-to-all"
    assert exchanged.bytes == 2 * 2 * BLOCKS * (TOKENS // 2) * width * 2


def test_stages_pass_hidden_states_on(tmp_path: Path) -> None:
    found = forecast(case(strategy=staged(2), ranks=2, accumulation=2), tmp_path)
    (sent,) = (one for one in found.traffic if one.collective == "send")
    assert sent.bytes == 4 * TOKENS * HIDDEN * 2
    assert found.work.idle == pytest.approx(1 / (4 + 1))


def test_samples_are_divided_among_data_parallel_ranks(tmp_path: Path) -> None:
    one = replace(case(strategy=tensor(2), ranks=8), samples=1)
    here = job(one, tmp_path, "cuda")
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


def advised(
    folder: Path, model: str, *training: str, network: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return what `pipe advise` says of H100s, and the plan of its recipe there."""
    recipe = folder / "recipe.yaml"
    machines = ("--gpus", "8", "--gpu", "H100", "--host-memory", "1500", *network)
    asked = ["advise", model, *machines, *training, "--out", str(recipe)]
    said = CliRunner().invoke(main, asked)
    assert said.exit_code == 0, said.output
    planned = CliRunner().invoke(main, ["plan", str(recipe), *machines, "--json"])
    return said.stdout, json.loads(planned.stdout)


@pytest.mark.full
def test_a_million_tokens_on_eight_gpus(tmp_path: Path) -> None:
    """Llama 8B: ranks share samples, since no other way fits."""
    said, plan = advised(tmp_path, LLAMA_8B, "--seq", str(1 << 20), "--global-batch", "8")
    assert said.startswith("chosen: fsdp-cp8 ")
    assert "data parallelism does not fit: " in said
    assert (plan["fits"], plan["data_ranks"]) == (True, 1)


@pytest.mark.full
def test_llama_70b_at_long_samples_offloads_nothing(tmp_path: Path) -> None:
    nodes = ("--nodes", "4", "--interconnect", "8x400g")
    said, plan = advised(tmp_path, LLAMA_70B, "--seq", "32768", network=nodes)
    assert said.startswith("chosen: fsdp-tp2 ")  # cp2 is faster, and leaves too little memory
    assert "\nfits too:\n  fsdp-cp2 " in said
    assert "offload" not in said.partition("\n")[0] + (tmp_path / "recipe.yaml").read_text("utf-8")
    assert plan["fits"] is True
    assert plan["copies"] == {"up": 0, "down": 0, "disk": 0}
