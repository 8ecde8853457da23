"""What docs/data.md says of rows is what the stage reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stages.data.forms import KEYS, first_form, read
from stages.data.messages import Conversation, Names
from stages.data.rows import Row
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs/data.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"^\| `([a-z_/]+)` \| `(\{.*\})` \|$", PAGE, re.M))


def test_every_form_has_an_example() -> None:
    assert EXAMPLES.keys() == KEYS.keys()


@pytest.mark.parametrize("form", KEYS)
def test_an_example_is_a_row_of_its_form(form: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(EXAMPLES[form] + "\n")
    assert first_form(file, Names()) == form
    row = Row(file=file, number=1, value=json.loads(EXAMPLES[form]), form=form)
    found = read(row, template=True, names=Names(), vocab_size=100)
    assert isinstance(found, Conversation) == (form not in ("text", "input_ids"))
