"""Checkpoints that are made, and the programs that make model files of them, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

RANKS = 2


class Input(NamedTuple):
    """A checkpoint. `size` is what it takes on disk, `needs` the memory to write it, in bytes of
    fp32 weights."""

    task: str
    job: Mapping[str, Any]
    size: float
    needs: float = 0.2


class Tool(NamedTuple):
    """A call that reads one input. `needs` is memory, with some room, and `size` what it writes, in
    bytes of fp32 weights."""

    name: str
    input: str
    task: str
    processes: int = 1
    needs: float = 0.0
    size: float = 1.0


INPUTS: Mapping[str, Input] = {
    "fsdp": Input("exporters.canonical:write", {"strategy": "fsdp"}, 3.0),
    "zero3": Input("exporters.canonical:write", {"strategy": "zero3"}, 3.0),
    "plain": Input("exporters.plain:write", {}, 1.0),
}
CP = "cp"


def _ours(source: str) -> list[Tool]:
    write = [Tool("ours, write", source, "exporters.ours:write", count) for count in (1, RANKS)]
    whole = [
        Tool("ours, write and prove", source, "exporters.ours:prove", count, needs=1.5)
        for count in (1, RANKS)
    ]
    return [Tool(CP, "plain", "exporters.copy:copy"), *write, *whole]


GROUPS: Mapping[str, Sequence[Tool]] = {"fsdp": _ours("fsdp"), "zero3": _ours("zero3")}
"""A group's inputs are on disk together."""


def chosen(tools: Sequence[Tool], only: Sequence[str]) -> list[Tool]:
    """`cp`, and those whose labels hold any of the words; without words, all."""
    words = only or [""]
    return [t for t in tools if t.name == CP or any(word in label(t) for word in words)]


def label(tool: Tool) -> str:
    """As in the table: `ours, write, of fsdp, 2 processes`."""
    more = f", {tool.processes} processes" if tool.processes > 1 else ""
    return f"{tool.name}, of {tool.input}{more}"


def inputs(tools: Sequence[Tool]) -> list[str]:
    """What they read, each once."""
    return list(dict.fromkeys(tool.input for tool in tools))


def disk(tools: Sequence[Tool]) -> float:
    """The most that is on disk at a time, in bytes of fp32 weights."""
    kept = sum(INPUTS[name].size for name in inputs(tools))
    return kept + max(tool.size for tool in tools)
