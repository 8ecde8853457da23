"""Words of a command line that were meant as overrides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipe.overrides import Meant, torn


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["train.steps=5"], None),
        (["train.steps=a=b"], None),
        (["train.steps", "5"], Meant(override="train.steps=5", words=1)),
        (["train.steps:", "5"], Meant(override="train.steps=5", words=1)),
        (["train.steps: 5"], Meant(override="train.steps=5")),
        (["train.steps", "=", "5"], Meant(override="train.steps=5", words=2)),
        (["--train.steps=5"], Meant(override="train.steps=5")),
        (["+train.steps=5"], Meant(override="train.steps=5")),
        (["train/steps=5"], Meant(override="train.steps=5")),
        (["train.steps", "wrap.stage=2"], Meant()),
        (["a.b={c:", "1}"], Meant(override="'a.b={c: 1}', in quotes", words=1)),
        (["train.steps= 5"], None),
        (["a.b=\n- c"], None),
        (["a.b=[ ':)','[a' ]", "a.c=]"], None),
        (["a.b=[c", "a.d=e]"], None),
        (["--train.steps=", "5"], Meant(override="train.steps=5", words=1)),
    ],
)
def test_what_is_meant(words: list[str], meant: Meant | None) -> None:
    assert torn(words[0], words[1:]) == meant


@pytest.mark.parametrize("word", ["a=yes", "a=@b", "a=[b", "a=b: c: d"])
def test_a_value_that_no_word_completes(word: str) -> None:
    assert torn(word, ["c.d=e", "]"]) is None


WORDS = st.text(st.sampled_from("ab.=:-+{}[] 5/"), max_size=8)


@given(words=st.lists(WORDS, min_size=1, max_size=4))
def test_no_more_words_are_taken_than_there_are(words: list[str]) -> None:
    meant = torn(words[0], words[1:])
    assert meant is None or 0 <= meant.words < len(words)
