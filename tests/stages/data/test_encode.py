"""What is encoded of a row, and how it is cut: see also test_turns.py and test_chat_entries.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.data.encode import Dropped, Encoded, RowEncoder, _tried
from stages.data.fields import ChatFields
from stages.data.messages import Names
from stages.data.mistakes import Mistake
from stages.data.rendering import Renderer
from stages.data.tokenize import TextTokenizer
from tests.stages.data.conftest import Chats
from tests.support.runs import spied
from tests.support.tier import examples


def truncated(row: Encoded, length: int) -> Encoded | Dropped:
    nothing: Any = None
    encoder = RowEncoder(
        fields=ChatFields(files="unused", sequence_length=length), names=Names(), tokens=nothing,
        vocab_size=99, start=[], dtype="<u2",
    )  # fmt: skip
    found = _tried(encoder._cut, nothing, row)
    assert not isinstance(found, Mistake)
    return found


@given(length=st.integers(2, 60), count=st.integers(2, 60))
@examples(30)
def test_a_row_is_cut_to_the_tokens_that_the_field_says(length: int, count: int) -> None:
    """TRL's `max_length` counts in the same way."""
    whole = Encoded(ids=np.arange(count), trained=np.ones(count, bool))
    found = truncated(whole, length)
    assert isinstance(found, Encoded)
    assert found.ids.tolist() == list(range(min(length, count)))
    assert found.long == found.kept_more == (count > length)


@pytest.mark.parametrize(
    ("tokens", "answer", "same"),
    [(9, 6, False), (10, 6, False), (10, 8, False), (10, 9, True), (8, 6, True)],
)
def test_rows_that_earlier_versions_treated_otherwise(tokens: int, answer: int, same: bool) -> None:
    """They kept rows of `sequence_length` + 1 tokens; one that is trained on from `answer` on."""
    row = Encoded(ids=np.arange(tokens), trained=np.arange(tokens) >= answer)
    assert truncated(row, 8).kept_more is not same


def test_the_rows_of_a_batch_are_encoded_together(
    chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with some of them, and whatever arguments of the template they have."""
    sizes = spied(monkeypatch, TextTokenizer, "__call__", lambda _, texts: len(texts))
    rendered = spied(monkeypatch, Renderer, "apply", lambda _, chat, messages: len(messages))
    says = {"user": "What is it?", "assistant": "It is that."}
    plain = {"messages": [{"role": role, "content": text} for role, text in says.items()] * 2}
    tools = [{**plain, "tools": [{"name": name}]} for name in "fg"]
    bad = [{"messages": [{"role": role, "content": "x"}]} for role in ("usr", "boot")]
    data = chats.run(*[plain, *tools] * 8, *bad * 4, bad_rows="drop")
    assert len(data.train) == 24
    assert sizes == [24]
    # whole, up to a generation prompt (twice) and up to an answer; of each list of tools
    assert sorted(rendered) == [8, 8, 8, 8, 8, 8, 16, 16, 16]
