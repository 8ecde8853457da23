"""Arguments of methods, chosen from results by type."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pipeline.chain.binding import Results
from pipeline.errors import UsageError


class Pair(NamedTuple):
    """A result that is itself a tuple."""

    one: int
    other: int


class Taker:
    """Takes a number, an optional text, and a pair."""

    def take(self, first: bytes, number: int, text: str | None, pair: Pair) -> tuple[object, ...]:
        return first, number, text, pair


def test_arguments_are_the_latest_results_of_their_types() -> None:
    known = Results.of(1.5, Pair(1, 2)) | {"a": 1, "b": (2, "text"), "c": None}
    results = Results(known)
    assert results.call(Taker(), "take", b"first") == (b"first", 2, "text", Pair(1, 2))
    assert [*results.each(int)] == [1, 2]
    assert results.latest(float) == 1.5


def test_arguments_that_a_slot_is_wired_to() -> None:
    results = Results(a=1, b=2, c="text", d=Pair(1, 2))
    assert results.call(Taker(), "take", b"", {"number": "a"}) == (b"", 1, "text", Pair(1, 2))
    left_out = {"number": "b", "text": None}
    assert results.call(Taker(), "take", b"", left_out) == (b"", 2, None, Pair(1, 2))
    assert results.missing(Taker(), "take", {"number": "gone", "pair": None}) == ["int", "Pair"]


def test_what_is_missing_is_named_unless_it_is_optional() -> None:
    assert Results(a="text").missing(Taker(), "take") == ["int", "Pair"]
    assert Results(a=1, b=Pair(1, 2)).missing(Taker(), "take") == []
    assert Results(a=1, b=Pair(1, 2)).call(Taker(), "take", b"")[2] is None
    with pytest.raises(UsageError, match="no number"):
        Results(a="text").require(int, "no number")
