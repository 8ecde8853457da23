"""Facts that must be the same on every rank, compared before they are used: nodes that differ in
one would train a mixture, and nothing would fail."""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from pipeline.utils.text import in_short

Facts = Mapping[str, Any]
"""JSON values by name."""
Place = tuple[int, str]
"""Where a rank runs: the number of its machine, in the order of ranks, and its name."""
SHOWN = 4
"""Differing facts, and nodes or runs of ranks, that a message names."""


class Group(Protocol):
    """Ranks that can exchange JSON values; a DistContext."""

    world_size: int
    local_rank: int

    def gather(self, value: Any) -> list[Any]: ...


def differences(dist: Group, facts: Facts) -> list[str]:
    """A sentence for each fact that is not the same on all ranks, with its values and their ranks;
    the same on every rank (collective). Only digests are exchanged where nothing differs."""
    if dist.world_size == 1:
        return []
    text = json.dumps(facts, sort_keys=True, default=str)
    own = hashlib.sha256(text.encode()).hexdigest()
    digests, local_ranks, hosts = zip(
        *dist.gather([own, dist.local_rank, socket.gethostname()]), strict=True
    )
    if len(set(digests)) == 1:
        return []
    nodes = itertools.accumulate(int(local == 0) for local in local_ranks)
    places = [(node - 1, host) for node, host in zip(nodes, hosts, strict=True)]
    return list(_differences(dist.gather(json.loads(text)), places))


def _differences(facts: Sequence[Facts], places: Sequence[Place]) -> Iterator[str]:
    for name in dict.fromkeys(name for each in facts for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(facts):
            ranks.setdefault(json.dumps(each.get(name), sort_keys=True), []).append(rank)
        if len(ranks) > 1:
            values = (
                f"{in_short(json.loads(value))} on {_where(those, places)}"
                for value, those in ranks.items()
            )
            yield f"{name} is {', '.join(values)}"


def _where(ranks: Sequence[int], places: Sequence[Place]) -> str:
    """Ranks in words, with their nodes if there are several."""
    runs = itertools.groupby(enumerate(ranks), key=lambda place: place[1] - place[0])
    edges = ([rank for _, rank in run] for _, run in runs)
    spans = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in edges]
    nodes = dict.fromkeys(places[rank] for rank in ranks)
    where = in_one([f"node {node}, {host}" for node, host in nodes])
    where = f" ({where})" if places[-1][0] > 0 else ""
    return f"rank{'s' * (len(ranks) > 1)} {in_one(spans, ', ')}{where}"


def in_one(found: Sequence[str], between: str = "; ") -> str:
    """Differences as one text; those after the first few are counted."""
    more = f"{between}and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return between.join(found[:SHOWN]) + more
