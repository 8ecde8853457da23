"""Where a run's checkpoints are, as its own folder remembers it: `checkpoints.at`.

Who finds no checkpoint there has lost them, and must not start from scratch without being told to.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.store import Store, step_name
from pipeline.errors import CheckpointError, ResumeRefused, in_words
from pipeline.utils.files import replace_text

if TYPE_CHECKING:
    from pipeline.distributed.process_group import DistContext


DEFAULT = "checkpoints"
"""Folder of a run's checkpoints in its own folder."""
FILE = "checkpoints.at"
RECIPE = "recipe.yaml"
"""File by which a run's folder is known."""
LONGEST = 4096
"""Characters of a path or an address."""


def default(run_dir: Path) -> str:
    """Where a run keeps its checkpoints if its recipe does not say."""
    return str(run_dir / DEFAULT)


def known(run_dir: Path) -> str | None:
    """Path or address of the checkpoints that the run has saved; None if it has saved none. Inside
    the run's folder they move with it. Raises CheckpointError for a file that names no place."""
    file = run_dir / FILE
    try:
        text = file.read_text("utf-8") if file.exists() else ""
    except ValueError:
        text = "\0"
    if not text.isprintable() or len(text) > LONGEST:
        raise CheckpointError(
            f"{file}: damaged: it names no place of checkpoints",
            hint=f"write into it where they are (`{DEFAULT}`: in the run's folder)",
        )
    return default(run_dir) if text == DEFAULT else text or None


def remember(run_dir: Path, address: str) -> None:
    """A checkpoint has been saved at `address`. Raises CheckpointError."""
    text = DEFAULT if address == default(run_dir) else address
    file = run_dir / FILE
    try:
        if not file.exists() or file.read_bytes() != text.encode():
            replace_text(file, text)
    except OSError as error:
        raise CheckpointError(f"{run_dir / FILE}: {error.strerror}") from error


def require_none(run_dir: Path, address: str) -> None:
    """To be asked where no checkpoint was found at `address`. Raises ResumeRefused if the run has
    saved one."""
    place = known(run_dir)
    if place is None:
        return
    if place == address:
        raise ResumeRefused(
            f"this run saved checkpoints in {place}, and now there are none",
            hint=f"bring them back (is it mounted?); to start over, delete {run_dir / FILE}",
        )
    raise ResumeRefused(
        f"this run saved its checkpoints in {place}, its recipe now says {address}",
        hint="set the checkpoint slot's folder as it was, or move them and delete "
        f"{run_dir / FILE}",
    )


_SIGN = "seen"
HINT = "checkpoints must be on a file system that all nodes share"


def require_shared(store: Store, dist: DistContext, identity: str) -> None:
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
