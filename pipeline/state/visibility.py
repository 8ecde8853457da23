"""Do all ranks see the same store? Without that, the writer of rank 0 would wait for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import CheckpointError, in_words
from pipeline.state.store import Store, step_name

if TYPE_CHECKING:
    from pipeline.dist import Dist

_SIGN = "seen"
HINT = "checkpoints must be on a file system that all nodes share"


def require_shared(store: Store, dist: Dist, identity: str) -> None:
    """Rank 0 writes, the others look (collective). Raises CheckpointError on every rank when that
    fails, and on those that cannot write."""
    try:
        attempt = store.attempt(step_name(0), identity)
        if dist.is_main:
            attempt.put(_SIGN, b"")
    except OSError as error:
        raise CheckpointError(
            f"rank {dist.rank} cannot write to {store.locate('')}: {in_words(error)}"
        ) from error
    dist.barrier()
    blind = [
        rank for rank, seen in enumerate(dist.gather(attempt.get(_SIGN) is not None)) if not seen
    ]
    attempt.abandon()
    if blind:
        raise CheckpointError(
            f"rank {blind[0]} does not see what rank 0 writes to {store.locate('')}", hint=HINT
        )
