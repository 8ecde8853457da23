"""The measured checkpoints, and the programs that make model files of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

RANKS = 2


class Input(NamedTuple):
    """A checkpoint, written by `task`. In bytes of fp32 weights: `size` is its size on disk,
    `needs` the memory to write it."""

    task: str
    job: Mapping[str, Any]
    size: float
    needs: float = 0.2


class Tool(NamedTuple):
    """A call that reads one input. In bytes of fp32 weights: `needs` is its memory, with some room,
    and `size` its output."""

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
"""Tools by group; the inputs of a group are on disk at the same time."""


def chosen(tools: Sequence[Tool], only: Sequence[str]) -> list[Tool]:
    """Return `cp`, and the tools whose labels contain any of the words; without words, all."""
    words = only or [""]
    return [t for t in tools if t.name == CP or any(word in label(t) for word in words)]


def label(tool: Tool) -> str:
    """Return the tool's label in the table: `ours, write, of fsdp, 2 processes`."""
    more = f", {tool.processes} processes" if tool.processes > 1 else ""
    return f"{tool.name}, of {tool.input}{more}"


def inputs(tools: Sequence[Tool]) -> list[str]:
    """Return the inputs of the tools, each once."""
    return list(dict.fromkeys(tool.input for tool in tools))


def disk(tools: Sequence[Tool]) -> float:
    """Return the peak disk space in bytes of fp32 weights."""
    kept = sum(INPUTS[name].size for name in inputs(tools))
    return kept + max(tool.size for tool in tools)
