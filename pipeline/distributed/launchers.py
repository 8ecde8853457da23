"""Placeholder until the map of launchers is merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    host: str
    port: int

    def environment(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True, kw_only=True)
class NodePlacement:
    source: str
    node_rank: int
    min_nodes: int
    max_nodes: int
    host: str
    port: int
    procs: int | None
    run_id: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    nodes: str | None = None
    node_rank: int | None = None
    rdzv: str | None = None
    hostfile: str | None = None


def placement(environ: Mapping[str, str]) -> RankPlacement | NodePlacement | None:
    return None


def combined(options: NodeOptions, found: object) -> RankPlacement | NodePlacement | None:
    if options.nodes is None:
        return None
    low, _, high = options.nodes.partition(":")
    host, _, port = (options.rdzv or "").rpartition(":")
    return NodePlacement(
        source="options",
        node_rank=options.node_rank or 0,
        min_nodes=int(low),
        max_nodes=int(high or low),
        host=host,
        port=int(port),
        procs=None,
    )
