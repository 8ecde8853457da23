"""Facts that must be the same on every rank, compared before they are used: nodes that differ in
one would train a mixture, and nothing would fail."""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pipeline.utils.text import in_short

Facts = Mapping[str, Any]
"""JSON values by name."""
SHOWN = 4
"""Differing facts, and nodes or runs of ranks, that a message names."""


class Group(Protocol):
    """Ranks that can exchange JSON values; a DistContext."""

    world_size: int
    local_rank: int

    def gather(self, value: Any) -> list[Any]: ...


class Place(NamedTuple):
    """Where a rank runs."""

    node: int
    """Number of its machine, in the order of ranks."""
    host: str


def differences(dist: Group, facts: Facts) -> list[str]:
    """A sentence for each fact that is not the same on all ranks, with its values and their ranks;
    the same on every rank (collective). Only digests are exchanged where nothing differs."""
    if dist.world_size == 1:
        return []
    text = json.dumps(facts, sort_keys=True, default=str)
    own = hashlib.sha256(text.encode()).hexdigest()
    met = dist.gather([own, dist.local_rank, socket.gethostname()])
    if len({each for each, _, _ in met}) == 1:
        return []
    nodes = itertools.accumulate(int(local == 0) for _, local, _ in met)
    places = [Place(node - 1, host) for node, (_, _, host) in zip(nodes, met, strict=True)]
    return list(_differences(dist.gather(json.loads(text)), places))


def _differences(facts: Sequence[Facts], places: Sequence[Place]) -> Iterator[str]:
    names = dict.fromkeys(name for each in facts for name in each)
    for name in names:
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
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    found = f"rank{'s' * (len(ranks) > 1)} {_listed(spans)}"
    if places[-1].node == 0:
        return found
    nodes = dict.fromkeys(places[rank] for rank in ranks)
    return f"{found} ({_listed([f'node {place.node}, {place.host}' for place in nodes], '; ')})"


def _listed(words: Sequence[str], between: str = ", ") -> str:
    more = f"{between}and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return between.join(words[:SHOWN]) + more


def in_one(found: Sequence[str]) -> str:
    """Differences as one text; those after the first few are counted."""
    return _listed(found, "; ")
