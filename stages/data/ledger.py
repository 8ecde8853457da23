"""What is known of shards that have been read: it stays when their tokens are gone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pipeline import jsonl
from pipeline.errors import StageError
from stages.data.shards import Shard


@dataclass(frozen=True, kw_only=True)
class Known:
    """A shard that has been tokenised once."""

    sha256: str
    """Of the file as it is stored."""
    tokens: int


class Ledger:
    """How many tokens each shard has, in `file`, one line a shard; an address and a way of making
    tokens (`making`, a digest) tell the lines apart.

    A run that resumes at some position learns from it in which window that is, without reading
    what came before.
    """

    def __init__(self, file: Path | None, making: str, text: str = "{}") -> None:
        self._file = file
        self._making = making
        self._known = {address: Known(**each) for address, each in json.loads(text).items()}

    @classmethod
    def read(cls, file: Path, making: str) -> str:
        """What the file knows, as text for other ranks' `Ledger`."""
        known = {
            record["address"]: {"sha256": record["sha256"], "tokens": record["tokens"]}
            for record in jsonl.read(file)
            if record.get("making") == making
        }
        return json.dumps(known)

    def tokens(self, shard: Shard) -> int | None:
        """The shard's tokens, if it has been read."""
        known = self._known.get(shard.address)
        return known.tokens if known else None

    def enter(self, shard: Shard, known: Known) -> None:
        """Note what was read. Raises StageError when it is not what was read before."""
        before = self._known.get(shard.address)
        if before is not None and before != known:
            raise StageError(
                f"{shard.address} is not the file that this run has read before",
                hint="restore it, or start a new run",
            )
        if before is None:
            self._known[shard.address] = known
            if self._file is not None:
                record = {"making": self._making, "address": shard.address, **vars(known)}
                jsonl.append(self._file, record, sync=True)
