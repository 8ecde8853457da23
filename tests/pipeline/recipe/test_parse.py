"""What is no YAML: the place to change and what to write, whatever the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import Location
from pipeline.recipe.parse import parse
from tests.support.tier import examples

RECIPE = "name: a\nstages:\n  model: {use: model.hf, path: './m'}\n  data:\n    files: [a, b]\n"
PIECES = [
    *"\t\n []{}\"'#@%`|>!?,=x:\u00a0\ufeff\x0c\u2028",
    *("  ", ": ", "- ", "&a", "*a", "\r\n", "---"),
]


def problems(text: str) -> list[str]:
    _, found = parse(
        text,
        locate=lambda line, column: Location(file="r", line=line + 1, column=column + 1),
        folder=Path("/"),
    )
    return [str(one) for one in found]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: b: c", 'r:1:4: text with a colon in it (put quotes around it: `a: "b: c"`)'),
        ("a:b\nc: 1", "r:1:1: a space is missing after the colon (write `a: b`)"),
        ("a = 1\nb: 1", "r:1:1: a key is followed by a colon, not by = (write `a: 1`)"),
        ("a\nb: 1", "r:1:1: a colon is missing here (write `a:`)"),
        ("// a\nb: 1", "r:1:1: a comment begins with #"),
        ("a: 'b\nc: 1\n", "r:1:4: the quote ' that opens here is not closed (add ')"),
        ("a: [1, 2\nb: 1\n", "r:1:4: the [ that opens here is not closed (add ])"),
        ("a: {b: 1 c: 2}", "r:1:11: a comma is missing before this, or } for the { before it"),
        ("a: @b", 'r:1:4: text that begins with @ needs quotes (write "@b")'),
        ("a: *.txt", 'r:1:4: text that begins with * needs quotes (write "*.txt")'),
        ("a:\n\tb: 1", "r:2:1: a tab cannot be used here (use spaces)"),
        (
            "a:\n    b: 1\n  c: 2",
            "r:3:3: its indentation matches no line above (indent it by 4 spaces)",
        ),
        (
            "a:\n  x:\n    b: 1\n  c: 2\n    d: 3",
            "r:4:3: indented less than the lines above and below, and it has a value (indent it by "
            "4 spaces)",
        ),
        (
            "a:\n  b: 1\n  c: 2\n    d: 3",
            "r:4:5: indented deeper than line 3, which has a value already (indent it by 2 spaces)",
        ),
        ("a: None", "r:1:4: `None` is text in YAML (write null)"),
    ],
)
def test_what_to_write(text: str, problem: str) -> None:
    assert problems(text)[0] == problem


@given(
    cuts=st.lists(st.tuples(st.integers(0, len(RECIPE)), st.sampled_from(PIECES)), max_size=4),
)
@examples(300)
def test_any_text_has_its_problems_within_it(cuts: list[tuple[int, str]]) -> None:
    text = RECIPE
    for place, piece in cuts:
        text = text[:place] + piece + text[place:]
    _, found = parse(
        text, locate=lambda line, column: Location(file="r", line=line, column=column),
        folder=Path("/"),
    )  # fmt: skip
    lines = [*text.splitlines(), ""]
    for problem in found:
        assert problem.location is not None
        assert 0 <= problem.location.line <= len(lines)
        assert problem.location.column >= 0
