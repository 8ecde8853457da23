"""What users read is in plain English: the words that tests/docs/words.py lists are not in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.docs import words

KINDS = [words.messages, words.docstrings, words.help_pages, words.pages, words.files]


@pytest.mark.parametrize("texts", KINDS, ids=lambda kind: kind.__name__)
def test_texts_for_users_have_none_of_the_words(texts: Callable[[], Iterator[words.Text]]) -> None:
    read = list(texts())
    assert len(read) > 100
    assert [
        (text.where, words.found(text.text), text.text) for text in read if words.found(text.text)
    ] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Run SLOT and all behind it again.", ["behind"]),
        ("the settings are those of the recipe", ["those of"]),
        ("Go on with that run, a folder of its own", ["go on", "of its own"]),
        ("it is no recipe", ["is no"]),
        ("there is no recipe; it is no longer there", []),
        ("the losses of which ranks, standalone", ["of which"]),
        ("bearer tokens are sent next to it", []),
    ],
)
def test_words_are_found(text: str, expected: list[str]) -> None:
    assert words.found(text) == expected
