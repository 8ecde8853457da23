"""The agreement of ranks before the first checkpoint does not grow with their number."""

from __future__ import annotations

import pytest

from pipeline.checkpoint.division import Run
from pipeline.checkpoint.file_layout import FULL, SHARDED, FileLayout
from pipeline.checkpoint.write_plan import (
    LocalShard,
    decode_division,
    divide,
    encode_shards,
    random_key,
    spans_of,
)
from pipeline.errors import StageError

SHAPES = [(f"weight/{number}", (4096 + number, 8)) for number in range(12)]


def told(rank: int, ranks: int, dtype: str = "F32") -> bytes:
    """Return the message of a rank with its rows of every tensor, and a generator."""
    own = []
    for key, (rows, columns) in SHAPES:
        chunk = -(-rows // ranks) * columns
        start, stop = min(rank * chunk, rows * columns), min((rank + 1) * chunk, rows * columns)
        if start < stop:
            own.append(LocalShard(key, dtype, (rows, columns), start, stop, True))
    own.append(LocalShard(random_key(rank, "torch"), "U8", (9,), 0, 9, True))
    return encode_shards(own)


@pytest.mark.parametrize("arrangement", [SHARDED, FULL], ids=lambda one: one.name)
def test_tensors_are_described_in_as_many_words_for_more_ranks(
    arrangement: FileLayout,
) -> None:
    described = {}
    for ranks in (4, 700):
        messages = [told(rank, ranks) for rank in range(ranks)]
        tensors, runs = decode_division(divide(messages, arrangement))
        assert [entry.key for entry in tensors] == [
            *(key for key, _ in SHAPES), *(f"random/{rank:05d}/torch" for rank in range(ranks))
        ]  # fmt: skip
        described[ranks] = [len(own) for own in runs[: len(SHAPES)]]
        assert runs[len(SHAPES) :] == [[Run(0, 9, 9, rank)] for rank in range(ranks)]
        mine = spans_of(ranks - 2, tensors, runs)
        assert [span.key for span in mine][-1] == f"random/{ranks - 2:05d}/torch"
    assert described[4] == described[700] == [1] * len(SHAPES)


def test_ranks_that_do_not_fit_together() -> None:
    with pytest.raises(StageError, match="weight/0: ranks differ in its shape or dtype"):
        divide([told(0, 2), told(1, 2, "BF16")], SHARDED)
    with pytest.raises(StageError, match="the ranks' parts do not make up weight/0: ends at"):
        divide([told(0, 3), told(1, 3)], SHARDED)
