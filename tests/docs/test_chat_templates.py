from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from stages.model.assets import turn_ends
from tests.support.tier import spread

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("chat_templates", DOCS / "chat_templates.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def templates(program: Any) -> dict[str, tuple[str, str | None]]:
    """Return templates to try, and gemma, which refuses a chat."""
    found = program.templates()
    return {name: found[name] for name in sorted({"gemma", *spread(list(found), 4)})}


@pytest.mark.full
def test_the_table_of_chat_templates_is_what_its_program_makes(program: Any) -> None:
    page = program.PAGE.read_text("utf-8")
    assert program.written(page, program.table()) == page


def test_rows_of_the_table_are_what_its_program_makes(
    program: Any, templates: dict[str, tuple[str, str | None]]
) -> None:
    rows = program.PAGE.read_text("utf-8").splitlines()
    for name, texts in templates.items():
        assert program.row(name, *texts) in rows


def test_chats_without_thoughts_or_calls_are_trained_under_every_template(
    program: Any, templates: dict[str, tuple[str, str | None]]
) -> None:
    """Gemma 1's takes no system message; nothing else is refused."""
    plain = [program.CHATS[name] for name in ("one turn", "two turns", "three turns")]
    refused = set()
    for name, (text, _) in templates.items():
        tokenizer = program.tokenizer(text)
        for chat in plain:
            if program.outcome(tokenizer, None, chat) != "+":
                refused.add((name, len(chat)))
            else:
                (sample,) = program.trained(tokenizer, chat)
                answers = [m["content"] for m in chat if m["role"] == "assistant"]
                assert len(sample) == len(answers), name
                assert all(a in s for a, s in zip(answers, sample, strict=True)), name
    assert refused == {("gemma", 7)}


def test_an_export_stops_where_training_ends_a_turn(
    program: Any, templates: dict[str, tuple[str, str | None]]
) -> None:
    for name, (text, _) in templates.items():
        tokenizer = program.tokenizer(text)
        ((turn,),) = program.trained(tokenizer, program.CHATS["one turn"])
        ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
        last = [id_ for id_ in ids if id_ in tokenizer.all_special_ids][-1:]
        assert set(last) <= {tokenizer.eos_token_id, *turn_ends(tokenizer)}, name
