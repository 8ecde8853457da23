"""Parts of an epoch; the slots are held by the cases of the tools."""

from __future__ import annotations

from fractions import Fraction

import pytest

from stages.importing.recipe import part_of_epoch


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Fraction(1), "1 epoch"), (Fraction(1, 4), "0.25 epochs"), (Fraction(1, 3), "1/3 epochs"),
        (Fraction("0.3"), "0.3 epochs"), (Fraction(5, 2), "2.5 epochs"),
        (Fraction(1, 10**9), "0.0001 epochs"),
    ],
)  # fmt: skip
def test_a_part_of_an_epoch(part: Fraction, text: str) -> None:
    assert part_of_epoch(part) == text
