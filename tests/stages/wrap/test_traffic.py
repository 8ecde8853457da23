"""Forecast traffic equals the bytes that collectives of real engines move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch import Tensor

from pipeline import testing
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import Precision
from pipeline.distributed.process_group import DistContext
from pipeline.planning.forecast import Profile
from pipeline.planning.planner import Planners
from pipeline.planning.shapes import ModelShape, OptimizerShape, Topology
from pipeline.planning.trace.run import kinds, structure
from tests.support.processes import run_ranks
from tests.support.runs import context, tiny_model
from tests.support.state import ADAMW, train
from tests.support.strategies import SMALL_GROUPS, STRATEGIES, Strategy, having

PLANNERS = Planners.installed()
MODEL = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
MICROBATCHES = 2
FORECAST = [one for one in having("basic").values() if PLANNERS.find(one.use)]
TORCH = [
    *(one for one in FORECAST if one.use != "wrap.zero"),
    STRATEGIES["fsdp grad-op"],
    STRATEGIES["fsdp reduce once"],
]
HYBRID = [STRATEGIES["fsdp hybrid"]]
SMALL = {"stage": 3, **SMALL_GROUPS}
ZERO = [
    *(one for one in FORECAST if one.use == "wrap.zero"),
    # Every parameter is small, and gathered only after the update.
    Strategy(use="wrap.zero", fields={"stage": 3}),
    # Parameters stay gathered until backward needs them again.
    Strategy(use="wrap.zero", fields=SMALL),
    Strategy(use="wrap.zero", fields={**SMALL, "max_reuse_distance": 0, "prefetch_bucket_size": 0}),
]


@pytest.mark.parametrize(("strategies", "ranks"), [(TORCH, 2), (HYBRID, 4), (ZERO, 2)])
def test_bytes_of_collectives(strategies: list[Strategy], ranks: int, tmp_path: Path) -> None:
    wraps = [one.stage() for one in strategies]
    found = run_ranks(counted, ranks, str(tmp_path), wraps)[0]
    assert found == [forecast(one, ranks, tmp_path) for one in strategies]


def forecast(one: Strategy, ranks: int, folder: Path) -> dict[str, int]:
    """Return the bytes by collective that the strategy's planner forecasts."""
    wrap, planner = one.stage(), PLANNERS.find(one.use)
    assert planner is not None
    topology = Topology(ranks=ranks, local_ranks=ranks, device="cpu")
    profile = only_weights(tiny_model(testing.context(folder), MODEL, ""))
    optimizer = OptimizerShape(algorithm="adamw", bits=64, moments=2)
    memory: Any = planner(wrap).forecast(topology, profile, policy(wrap), optimizer)
    sums = Counter[str]()
    for moved in memory.traffic(MICROBATCHES):
        sums[moved.collective] += moved.bytes
    return dict(sums)


def only_weights(source: ModelSource) -> Profile:
    """Return a profile that has only the model's weights."""
    whole = structure(source)
    numbers = kinds(whole.signatures)
    places = [numbers.index(kind) for kind in sorted(set(numbers))]
    elements = sum(one.elements for one in whole.weights)
    model = ModelShape(
        root=tuple(whole.root), kinds=tuple(tuple(whole.blocks[place]) for place in places),
        blocks=tuple(numbers), late=(), tied=whole.tied, ends=whole.ends,
        vocabulary=source.vocab_size, parameters=elements, exported=elements, proven=elements,
    )  # fmt: skip
    return Profile(model=model, parts={}, recomputed=(False,) * len(places))


LITTLE = 64
"""Largest size of norms and losses, in bytes; they do not count."""


def counted(dist: DistContext, folder: str, wraps: list[Any]) -> list[dict[str, int]]:
    """Return the bytes of whole tensors by collective, in the fourth step of each wrap stage.
    Engines compute in bf16 and reduce in fp32, but DDP reduces in bf16."""
    found = Counter[str]()
    _count(found)
    ctx = context(dist, folder)
    told = []
    for wrap in wraps:
        engine = wrap.run(ctx, tiny_model(ctx, MODEL, ""), policy(wrap), ADAMW.run(ctx))
        train(engine, 0, 3, dist.world_size * MICROBATCHES)
        found.clear()
        train(engine, 3, 4, dist.world_size * MICROBATCHES)
        told.append(dict(+found))  # without what is 0
        engine.close()
    return told


def policy(wrap: Any) -> Precision:
    """Return the dtypes for a wrap stage here."""
    reduce = "bf16" if type(wrap).__name__ == "Ddp" else "fp32"
    return Precision(
        master="fp32", compute="bf16", reduce=reduce, buffer=None, loss_scaling=None  # type: ignore[arg-type]
    )  # fmt: skip


def _count(found: Counter[str]) -> None:
    """Have every process group add up the bytes that it is given."""

    def count(method: str, collective: str, which: int) -> None:
        original: Callable[..., Any] = getattr(torch.distributed.ProcessGroup, method)

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            size = _bytes(args[which])
            found[collective] += size if size > LITTLE else 0
            return original(group, *args, **kwargs)

        setattr(torch.distributed.ProcessGroup, method, call)

    for name in ("all_gather_single", "all_gather_single_coalesced", "allgather"):
        count(name, "all-gather", 0)
    for name in ("reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter"):
        count(name, "reduce-scatter", 1)
    for name in ("allreduce", "allreduce_coalesced"):
        count(name, "all-reduce", 0)
    count("broadcast", "broadcast", 0)


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors))
