"""Rows tokenised: ids and mask by hand, what is dropped, cut and told, and what the cache knows."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import NO_TARGET, Context, Data, Sample
from stages.data.chat_entries import ChatEntries
from stages.data.fields import ChatSource
from stages.data.stages import ChatData
from stages.model.hf import HfModel
from tests.stages.data.conftest import Chats, trained_ids
from tests.stages.data.fakes import MARKED, PLAIN, SPECIAL, FakeSource, ids
from tests.support.runs import spied
from tests.support.tier import times

START, STOP = SPECIAL["<|s|>"], SPECIAL["<|e|>"]
RECIPES = Path(__file__).parents[3] / "recipes"
MODEL = RECIPES / "models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
_ = NO_TARGET


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


HELLO = [message("user", "A"), message("assistant", "b")]
TWO_TURNS = [*HELLO, message("user", "C"), message("assistant", "d")]
ONE, TWO, SILENT = {"messages": HELLO}, {"messages": TWO_TURNS}, {"messages": HELLO[:1]}


def only(data: Data) -> Sample:
    assert len(data.train) == 1
    sample = data.train[0]
    assert data.train.targets(0) == int((sample.labels != NO_TARGET).sum())
    return sample


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_golden_tokens_and_mask(chats: Chats, template: str) -> None:
    sample = only(chats.run(ONE, chat_template=template))
    user = [START, 84, 82, 68, 81, 198, 32, STOP, 198]
    assistant = [START, 64, 82, 82, 72, 82, 83, 64, 77, 83, 198, 65, STOP]
    assert sample.input_ids.tolist() == user + assistant
    assert sample.labels.tolist() == [_] * 19 + [65, STOP, _]
    both = only(chats.run(TWO, chat_template=template))
    assert trained_ids(both) == [*ids("b"), STOP, *ids("d"), STOP]
    last = only(chats.run(TWO, chat_template=template, loss="last"))
    assert trained_ids(last) == [*ids("d"), STOP]
    assert last.input_ids.tolist() == both.input_ids.tolist()


@settings(
    max_examples=times(quick=25, full=250),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    contents=st.lists(st.text(" ab\n\té🎉", max_size=6), min_size=2, max_size=6),
    marked=st.booleans(),
)
def test_targets_spell_what_the_assistant_said(
    chats: Chats, contents: list[str], marked: bool
) -> None:
    roles = ["user", "assistant"] * 3
    messages = [message(role, text) for role, text in zip(roles, contents, strict=False)]
    source = FakeSource(MARKED if marked else PLAIN)
    sample = only(chats.run({"messages": messages}, source=source))
    said = "".join(f"{m['content']}<|e|>" for m in messages if m["role"] == "assistant")
    assert source.fast.decode(trained_ids(sample)) == said
    shown = source.fast.decode([*sample.input_ids.tolist(), *ids("\n")])
    assert shown == source.fast.apply_chat_template(messages, tokenize=False)


def test_system_tools_and_template_arguments(chats: Chats) -> None:
    row = {
        "id": 7, "tokenize": True, "tools": [{"name": "T"}], "chat_template_kwargs": {"mood": "M"},
        "messages": [message("system", "S"), *HELLO],
    }  # fmt: skip
    sample = only(chats.run(row, chat_template="{{ tools[0].name }}{{ mood }}" + PLAIN))
    turns = [("system", "S"), ("user", "A"), ("assistant", "b")]
    texts = [[START, *ids(f"{role}\n{text}"), STOP, *ids("\n")] for role, text in turns]
    assert sample.input_ids.tolist() == [*ids("TM"), *texts[0], *texts[1], *texts[2]][:-1]
    assert trained_ids(sample) == [*ids("b"), STOP]


def test_an_assistant_message_may_hold_only_a_tool_call(chats: Chats) -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.content or m.tool_calls[0].name }}")
    messages = [HELLO[0], {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    row = {"messages": messages, "tools": []}
    assert trained_ids(only(chats.run(row, chat_template=template))) == [*ids("f"), STOP]


def test_the_time_of_each_source(
    chats: Chats, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spied(monkeypatch, ChatEntries, "build", lambda *_: time.sleep(0.3))  # builds slowly
    caplog.set_level(logging.INFO)
    files = [chats.stage(row, name=f"{n}.jsonl").files for n, row in enumerate((ONE, TWO))]
    chats.run(files=(), sources=tuple(ChatSource(files=each) for each in files))
    seconds = re.findall(r"jsonl: 1 row .*, (\d+\.\d) s$", caplog.text, re.MULTILINE)
    assert (len(seconds), min(map(float, seconds)) >= 0.3) == (2, True)


def test_prompt_and_completion(chats: Chats) -> None:
    as_messages = only(chats.run(ONE))
    as_text = only(chats.run({"prompt": "A", "completion": "b"}))
    assert as_text.labels.tolist() == as_messages.labels.tolist()
    lists = only(chats.run({"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}))
    assert trained_ids(lists) == [*ids("d"), STOP]
    plain = {"prompt": "ab ", "completion": " cd"}
    sample = only(chats.run(plain, chat_template=None, template=False))
    assert sample.input_ids.tolist() == ids("ab  cd")
    assert sample.labels.tolist() == [_, _, *ids(" cd"), SPECIAL["<|end|>"]]
    assert re.search(r"no chat template.*template: false", chats.error(plain, chat_template=None))


def test_too_long(chats: Chats, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    after = {"messages": [message("user", "x" * 50), HELLO[1]]}
    caplog.set_level(logging.INFO)
    data = chats.run(TWO, after, sequence_length=22)
    assert re.search(
        r"a\.jsonl: 2 rows \(messages\), 1 sample, 22 tokens, 2 trained on, 2 rows cut to 22 "
        r"tokens, 1 row dropped, \d\.\d s$",
        caplog.text,
        re.MULTILINE,
    )
    assert str(tmp_path) not in caplog.text.split("a.jsonl:", 1)[1].splitlines()[0]
    assert len(data.train) == 1
    assert len(data.train[0].input_ids) == 21
    assert str(data.identity["rows_cut_to"]).startswith("sequence_length tokens")
    assert trained_ids(data.train[0]) == [*ids("b"), STOP]
    assert "dropped 1 row whose trained tokens all come after `sequence_length`" in caplog.text
    assert "a.jsonl:2" in caplog.text
    found = chats.error(TWO, sequence_length=22, too_long="error")
    assert found.startswith("a.jsonl:1: 46 tokens, but `sequence_length` is 22")
    data = chats.run(TWO, ONE, sequence_length=30, too_long="drop")
    assert "1 row dropped (1 longer than 30 tokens)" in caplog.text
    assert trained_ids(only(data)) == [*ids("b"), STOP]


@pytest.mark.parametrize("treatment", ["truncate", "drop", "error"])
@pytest.mark.parametrize("packing", [False, True])
def test_a_row_of_as_many_tokens_as_a_sample_may_have(
    chats: Chats, treatment: str, packing: bool
) -> None:
    data = chats.run(TWO, too_long=treatment, packing=packing, sequence_length=46)
    assert len(data.train[0].input_ids) == 45  # the last token is only predicted
    assert "rows_cut_to" not in data.identity  # as in earlier versions


def test_rows_without_targets_are_dropped(
    chats: Chats, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chats.run(ONE, *[SILENT] * 6)
    (told,) = [each for each in caplog.messages if each.startswith("dropped")]
    assert told.startswith("dropped 6 rows without a message of the assistant, the first: ")
    assert told.endswith("a.jsonl:2")
    assert chats.error({"messages": [HELLO[0], message("user", "b")]}, SILENT) == (
        "no token to train on in 2 rows: 2 rows without a message of the assistant "
        "(check `loss`, the roles of the messages, the chat template and `sequence_length`)"
    )
    unseen = {"messages": [HELLO[0], {**HELLO[1], "train": False}]}
    assert chats.error(SILENT, unseen).startswith(
        "no token to train on in 2 rows: 1 row without a message of the assistant; "
        "1 row without a token to train on (check `loss`"
    )
    (tmp_path / "held.jsonl").write_text(json.dumps(SILENT))
    found = chats.error(ONE, heldout_files=str(tmp_path / "held.jsonl"))
    assert found.startswith("no token to train on in 1 row: 1 row ")


def test_the_cache_knows_the_template_and_the_settings(
    chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = [
        chats.run(TWO).fingerprint,
        chats.run(TWO, chat_template=MARKED).fingerprint,
        chats.run(TWO, loss="last").fingerprint,
        chats.run(TWO, sequence_length=30).fingerprint,
    ]
    assert len(set(prints)) == 4

    def no_encoder(*arguments: Any) -> Any:
        raise AssertionError("tokenised again")

    monkeypatch.setattr("stages.data.encode.RowEncoder.batch", no_encoder)
    again = chats.run(TWO)
    assert again.fingerprint == prints[0]
    assert trained_ids(again.train[0]) == [*ids("b"), STOP, *ids("d"), STOP]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_template_is_told_the_date_that_is_set(chats: Chats, template: str) -> None:
    source = FakeSource("\n  {{ strftime_now('%d %b %Y, 100%%d') }}" + template)
    data, plain = chats.run(ONE, source=source), chats.run(ONE)
    expected = [*ids("\n  26 Jul 2024, 100%d"), *plain.train[0].input_ids.tolist()]
    assert only(data).input_ids.tolist() == expected
    assert trained_ids(data.train[0]) == [*ids("b"), STOP]
    other = chats.run(ONE, source=source, today="2031-01-02")
    assert only(other).input_ids.tolist()[:14] == ids("\n  02 Jan 2031")
    assert other.fingerprint != data.fingerprint


def test_a_template_that_forgets_earlier_turns(chats: Chats) -> None:
    """Templates that show the reasoning of the last answer only do this."""
    for template in (PLAIN, MARKED):
        last = template.replace("{{ m.content }}", "{{ 'R' if loop.last }}{{ m.content }}")
        sample = only(chats.run(TWO, chat_template=last))
        assert trained_ids(sample) == [*ids("b"), STOP, *ids("Rd"), STOP]
    found = chats.error(TWO, chat_template="{{ messages|length }}")
    assert "leaves out content of messages[0] and 3 more" in found


HEADED = (
    "{% for m in messages %}<|s|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ '\n' + m.content }}<|e|>{{ '\n' }}{% endgeneration %}"
    "{% else %}{{ '\n' + m.content }}<|e|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
"""Marks also the line breaks after a header and after the end of a turn, as TRL's training
templates of Qwen do."""


@pytest.mark.parametrize(
    ("fields", "said"), [({}, "bd"), ({"loss": "last"}, "d"), ({"loss": "assistant"}, "bd")]
)
def test_markers_are_taken_at_their_word(chats: Chats, fields: dict[str, Any], said: str) -> None:
    rows = {"messages": [*TWO_TURNS, message("user", "e")]}
    sample = only(chats.run(rows, chat_template=HEADED, **fields))
    expected = [t for word in said for t in (*ids(f"\n{word}"), STOP, *ids("\n"))]
    assert trained_ids(sample) == expected
    silent = [TWO_TURNS[0], {**TWO_TURNS[1], "train": False}, *TWO_TURNS[2:]]
    sample = only(chats.run({"messages": silent}, chat_template=HEADED, **fields))
    assert trained_ids(sample) == [*ids("\nd"), STOP, *ids("\n")]


def test_a_slow_tokenizer_is_refused(chats: Chats, source: FakeSource) -> None:
    source.fast = type("Slow", (), {"is_fast": False})()
    assert "tokenizer.json" in chats.error(ONE, source=source)


@pytest.mark.parametrize("packing", [False, True])
def test_a_published_model_and_the_bundled_conversations(
    ctx: Context, tmp_path: Path, packing: bool
) -> None:
    """The tokenizer and template of the model that recipes train (recipes/fetch_smollm.py)."""
    file = RECIPES / "data/chat.jsonl"
    stage = ChatData(
        files=str(file), sequence_length=512, packing=packing, cache=str(tmp_path / "cache")
    )
    model = HfModel(path=str(MODEL)).run(ctx)
    data, tokenizer = stage.run(ctx, model), model.tokenizer()
    said: list[str] = []
    for index in range(len(data.train)):
        labels = data.train[index].labels
        text = tokenizer.decode(labels[labels != NO_TARGET])
        said += text.removesuffix("<|im_end|>").split("<|im_end|>")
        assert data.train.targets(index) == int((labels != NO_TARGET).sum())
    rows = [json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()]
    wanted = [each["content"] for row in rows for each in row if each["role"] == "assistant"]
    assert sorted(said) == sorted(wanted)
    assert len(rows) == 64
    assert len(data.train) == (7 if packing else len(rows))
