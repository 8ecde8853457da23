"""Variables of launchers: numbers, and errors that name them."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.distributed.placement import RankPlacement, number
from pipeline.errors import UsageError

Environ = Mapping[str, str]


def consistent(
    found: RankPlacement, environ: Environ, rank: str, size: str, local_rank: str, local_size: str
) -> RankPlacement:
    """The placement, if its numbers can be. Raises UsageError with the variables that differ."""
    here = found.local_world_size
    if found.rank >= found.world_size:
        raise UsageError(f"{settings(environ, [rank, size])}: ranks count from 0")
    if here is not None and found.local_rank >= here:
        raise UsageError(f"{settings(environ, [local_rank, local_size])}: ranks count from 0")
    if here is not None and here > found.world_size:
        raise UsageError(
            f"{settings(environ, [local_size, size])}: this machine cannot have more than all"
        )
    return found


def optional(environ: Environ, name: str) -> int | None:
    """A variable's whole number; None if it is not set. Raises UsageError."""
    return number(environ, name) if environ.get(name) else None


def incomplete(environ: Environ, found: list[str], missing: list[str]) -> UsageError:
    """The error for a launcher that has set some of its variables and not others."""
    return UsageError(
        f"{settings(environ, found)} {'are' if len(found) > 1 else 'is'} set by a launcher of "
        f"several processes, but not {', '.join(missing)}: each process would start its own run",
        hint="start `torchrun -m pipetrain run RECIPE` once per node; "
        f"or unset {' and '.join(found)}",
    )


def settings(environ: Environ, names: list[str]) -> str:
    """Variables with their values, for messages."""
    return " and ".join(f"{name}={environ[name]}" for name in names if name in environ)
