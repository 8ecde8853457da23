"""Lists of hosts: Slurm's short form, and DeepSpeed's hostfiles."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from pipeline.errors import UsageError, system_errors_as
from pipeline.utils.foreign import read_whole

MOST_HOSTS = 65_536
_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)\s*")


def expand_hosts(text: str) -> list[str]:
    """Hosts of a Slurm host list, as in `n[001-003,7]-ib,gpu-a`. Raises UsageError."""
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(f"{text},"):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and (depth == 0 or place == len(text)):
            parts.append(text[begin:place])
            begin = place + 1
    return _at_most(text, (host for part in parts for host in _expand(part, text)))


def _at_most(text: str, hosts: Iterator[str]) -> list[str]:
    found = list(itertools.islice(hosts, MOST_HOSTS + 1))
    if len(found) > MOST_HOSTS:
        raise UsageError(f"more than {MOST_HOSTS} hosts in the host list {text[:80]}")
    return found


def _expand(part: str, text: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        if not part or "]" in part:
            raise UsageError(f"the host list {text} is not one of Slurm's")
        yield part
        return
    ranges, closing, tail = rest.partition("]")
    if not closing:
        raise UsageError(f"the host list {text} is not one of Slurm's")
    tails = _at_most(text, _expand(tail, text)) if tail else [""]
    for one in ranges.split(","):
        low, dash, high = one.partition("-")
        if not (low.isdecimal() and (high.isdecimal() or not dash)):
            raise UsageError(f"the host list {text} is not one of Slurm's")
        last = int(high) if dash else int(low)
        for value in range(int(low), last + 1):
            yield from (f"{head}{value:0{len(low)}}{end}" for end in tails)


def expand_counts(text: str) -> list[int]:
    """Tasks of each node of Slurm's `2(x3),1`. Raises UsageError."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found or int(found[2] or 1) > MOST_HOSTS:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text} does not read like 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def read_hostfile(file: Path) -> dict[str, int]:
    """Host -> slots of DeepSpeed's hostfile: lines of `HOST slots=N`, comments after #. All have
    the same number of slots. Raises UsageError with file and line."""
    with system_errors_as(UsageError):
        text = read_whole(file).decode("utf-8", errors="replace")
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content, place = line.partition("#")[0].strip(), f"{file}:{number}"
        if not content:
            continue
        found = _LINE.fullmatch(content)
        if not found or int(found[2]) == 0:
            raise UsageError(f"{place}: `{content}` does not read like: worker-1 slots=8")
        host, slots = found[1], int(found[2])
        if host in hosts:
            raise UsageError(f"{place}: {host} occurs twice")
        first, expected = next(iter(hosts.items()), (host, slots))
        if slots != expected:
            raise UsageError(
                f"{place}: {host} has {slots} slots, but {first} has {expected}: all nodes need "
                "the same number"
            )
        hosts[host] = slots
    if not hosts:
        raise UsageError(f"{file}: no host in the file", hint="a line reads: worker-1 slots=8")
    return hosts


def own_rank(file: Path, hosts: Sequence[str]) -> int:
    """Place of this machine among the hosts. Raises UsageError if it is none or several of them."""
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    addresses = {a.address for found in psutil.net_if_addrs().values() for a in found}
    mine = [rank for rank, host in enumerate(hosts) if host in names | addresses]
    mine = mine or [rank for rank, host in enumerate(hosts) if _addresses(host) & addresses]
    if len(mine) != 1:
        which = "none" if not mine else "several"
        found = ", ".join(hosts[rank] for rank in mine) or ", ".join(hosts)
        raise UsageError(
            f"this machine, {socket.gethostname()}, is {which} of the hosts in {file}: {found}",
            hint="say which with --node-rank",
        )
    return mine[0]


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
