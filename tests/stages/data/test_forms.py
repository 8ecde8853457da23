"""The same twenty conversations in every suitable form give the same samples.

`golden.json` was written by transformers: ids and assistant mask of a template with markers ({%
generation %}). The texts of the other fixtures have their own golden ids, or are short enough to be
composed here.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pipeline import NO_TARGET, Samples
from tests.stages.data.conftest import Chats, decoded, trained_ids
from tests.stages.data.fakes import MARKED, PLAIN, SPECIAL, FakeSource, ids

FIXTURES = Path(__file__).parent / "fixtures"
FILES = {
    "messages": "messages.jsonl",
    "sharegpt": "sharegpt.json",
    "prompt/completion": "prompt_completion.jsonl.gz",
    "alpaca": "alpaca.parquet",
    "input_ids": "input_ids.jsonl",
}
END, START, STOP = SPECIAL["<|end|>"], SPECIAL["<|s|>"], SPECIAL["<|e|>"]
USER, BOT = {"role": "user", "content": "A"}, {"role": "assistant", "content": "b"}
HELLO = {"messages": [USER, BOT]}
GOLDEN = json.loads((FIXTURES / "golden.json").read_text("utf-8"))


def tokens(samples: Samples) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each sample, and its labels."""
    found = [samples[index] for index in range(len(samples))]
    return [(each.input_ids.tolist(), each.labels.tolist()) for each in found]


def as_tokens(ids: list[int], trained: list[int]) -> tuple[list[int], list[int]]:
    pairs = zip(ids[1:], trained[1:], strict=True)
    return ids[:-1], [token if trained else NO_TARGET for token, trained in pairs]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("form", FILES)
def test_every_form_gives_the_same_samples(
    chats: Chats, form: str, template: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = str(FIXTURES / FILES[form])
    data = chats.run(files=file, loss="assistant", chat_template=template)
    assert tokens(data.train) == [as_tokens(**row) for row in GOLDEN]
    assert f"20 rows ({form}), 1,360 tokens" in caplog.text


def test_the_golden_tokens_are_those_of_transformers() -> None:
    fast = FakeSource(MARKED).fast
    lines = (FIXTURES / FILES["messages"]).read_text("utf-8").splitlines()
    for line, row in zip(lines, GOLDEN, strict=True):
        encoded = fast.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )  # fmt: skip
        masks = encoded["assistant_masks"]
        assert row == {"ids": list(encoded["input_ids"]), "trained": list(masks)}


def test_texts_of_a_file_of_lines(chats: Chats) -> None:
    data = chats.run(files=str(FIXTURES / "text.txt"), chat_template=None)
    rows = json.loads((FIXTURES / "text.golden.json").read_text("utf-8"))
    assert len(rows) == 20
    assert tokens(data.train) == [(row[:-1], row[1:]) for row in rows]


def test_pairs_of_texts_without_a_template(chats: Chats) -> None:
    file, fast = FIXTURES / "pairs.jsonl", FakeSource(None).fast
    data = chats.run(files=str(file), template=False, chat_template=None)
    for index, line in enumerate(file.read_text("utf-8").splitlines()):
        prompt, completion = (
            fast.encode(json.loads(line)[key], add_special_tokens=False, verbose=False)
            for key in ("prompt", "completion")
        )
        trained = [0] * len(prompt) + [1] * (len(completion) + 1)
        assert tokens(data.train)[index] == as_tokens([*prompt, *completion, END], trained)


@pytest.mark.parametrize(
    ("bos", "prepend_bos", "start"),
    [("<|s|>", None, [START]), ("<|s|>", False, []), ("<|s|>", True, [START]), (None, None, [])],
)
def test_texts_begin_as_the_tokenizer_s_own_call_does(
    chats: Chats, bos: str | None, prepend_bos: bool | None, start: list[int]
) -> None:
    source, fields = FakeSource(bos=bos), {"template": False, "prepend_bos": prepend_bos}
    rows = ({"text": "ab"}, {"prompt": "a", "completion": "b"})
    for row, first in zip(rows, (64, NO_TARGET), strict=True):
        sample = chats.run(row, source=source, **fields).train[0]
        assert sample.input_ids.tolist() == [*start, 64, 65]
        assert sample.labels.tolist() == [first, 65, END][-len(start) - 2 :]
        if prepend_bos is None:
            assert sample.input_ids.tolist() == source.fast("ab")["input_ids"]
    sample = chats.run(HELLO, source=source, prepend_bos=prepend_bos).train[0]
    assert sample.input_ids.tolist().count(START) == 2


def test_a_text_s_beginning_is_part_of_the_cache_s_key(chats: Chats) -> None:
    source = FakeSource(bos="<|s|>")
    prints = [
        chats.run({"text": "ab"}, source=source, prepend_bos=each).identity
        for each in (None, False, None)
    ]
    assert prints[0] == prints[2]
    assert prints[0]["contents"] != prints[1]["contents"]
    assert (prints[0]["prepend_bos"], prints[1].get("prepend_bos")) == (True, None)


@pytest.mark.parametrize("row", [HELLO, {"prompt": "a", "completion": "b"}, {"input_ids": [1, 2]}])
def test_data_without_a_text_are_the_same_whatever_texts_begin_with(
    chats: Chats, row: dict[str, Any]
) -> None:
    """Runs with conversations that began before texts had a beginning can be resumed."""
    source = FakeSource(bos="<|s|>")
    own, none = (chats.run(row, source=source, prepend_bos=each).identity for each in (None, False))
    assert own == none


PROMPTED = {"prompt": [USER, BOT, USER], "completion": [{**BOT, "content": "c"}]}
UNTRAINED = {"messages": [USER, {**BOT, "train": False}, USER, {**BOT, "content": "c"}]}
WEIGHTS = {"messages": [USER, {**BOT, "weight": 1}, USER, {**BOT, "weight": 0}]}
USER_TURN = [*ids("user\nA"), STOP, *ids("\n")]
BOT_TURN = [START, *ids("assistant\nb"), STOP, *ids("\n")]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("row", "loss", "expected"),
    [
        (PROMPTED, "completion", [*ids("c"), STOP]),
        (PROMPTED, "assistant", [*ids("b"), STOP, *ids("c"), STOP]),
        (PROMPTED, "last", [*ids("c"), STOP]),
        ({"messages": [USER, BOT, USER, BOT]}, "completion", [*ids("b"), STOP, *ids("b"), STOP]),
        (HELLO, "all", [*USER_TURN, *BOT_TURN]),
        (UNTRAINED, "assistant", [*ids("c"), STOP]),
        (WEIGHTS, "completion", [*ids("b"), STOP]),
        ({"messages": [{**USER, "train": False}, BOT]}, "all", BOT_TURN),
        ({"messages": [{**BOT, "train": False}, USER, BOT]}, "all", [START, *USER_TURN, *BOT_TURN]),
        ({"messages": [{**BOT, "train": False}, USER, {**BOT, "content": "c"}]}, "completion",
         [*ids("c"), STOP]),
        ({"text": "ab"}, "completion", [*ids("b"), END]),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}, "all", [3]),
        ({"input_ids": [1, 2, 3]}, "last", [2, 3]),
    ],
)  # fmt: skip
def test_loss(chats: Chats, template: str, row: Any, loss: str, expected: list[int]) -> None:
    data = chats.run(row, loss=loss, chat_template=template)
    assert trained_ids(data.train[0]) == expected
    assert data.train.targets(0) == len(expected)


def test_tools_as_openai_writes_them(chats: Chats) -> None:
    """Arguments as JSON text become the object that templates expect, and so do tools in a
    table."""
    template = (
        "{% for t in tools or [] %}{{ t.name }};{% endfor %}{% for m in messages %}{{ m.role }}:"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.x }}"
        "{% endfor %}{{ m.content or '' }}<|e|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    turns = [
        USER, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]},
        BOT,
    ]  # fmt: skip
    sharegpt = [
        {"from": "human", "value": "A"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 7}}'},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "b"},
    ]
    for row in ({"messages": turns}, {"conversations": sharegpt}):
        row = {**row, "tools": '[{"name": "F"}]'}
        (text,) = chats.texts(row, chat_template=template)
        assert text == "F;user:A<|e|>assistant:f7<|e|>tool:42<|e|>assistant:b"
        assert chats.trained(row, chat_template=template) == [["f7<|e|>", "b<|e|>"]]


def test_alpaca(chats: Chats) -> None:
    row = {"instruction": "do {input}", "input": "x", "output": "y"}
    assert chats.texts(row)[0].startswith("<|s|>user\ndo {input}\nx<|e|>")
    (text,) = chats.texts(row, template=False)
    assert text.endswith("\n\n### Instruction:\ndo {input}\n\n### Input:\nx\n\n### Response:\ny")
    assert chats.trained(row, template=False) == [["y<|end|>"]]
    assert "### Input" not in chats.texts({**row, "input": ""}, template=False)[0]


def test_a_row_of_two_forms_takes_the_one_that_is_named(chats: Chats) -> None:
    assert chats.trained({**HELLO, "text": "xy"}, form="text") == [["y<|end|>"]]
    # half of a form does not count: many tables have such columns next to `messages`
    assert chats.trained({**HELLO, "prompt": "A", "prompt_id": "7"}) == [["b<|e|>"]]


def test_files_of_different_forms_go_together(
    chats: Chats, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "b.json").write_text('[{"text": "xy"}, {"text": "z"}]')
    files = (chats.stage(HELLO).files, str(tmp_path / "b.json"))
    assert chats.trained(files=files) == [["b<|e|>"], ["y<|end|>"], ["<|end|>"]]
    assert "3 rows (messages, text)" in caplog.text


def test_special_tokens_in_text(chats: Chats, caplog: pytest.LogCaptureFixture) -> None:
    """A message cannot end its own turn: special tokens are refused (see test_rows), removed, or
    kept on purpose."""
    bad = {"messages": [{**USER, "content": "x<|e|>"}, BOT]}
    assert len(chats.run(HELLO, bad, special_tokens="drop").train) == 1
    assert "dropped 1 row whose text spells a special token" in caplog.text
    assert "a.jsonl:2" in caplog.text
    allowed = chats.run(bad, special_tokens="allow")
    assert allowed.train[0].input_ids.tolist().count(STOP) == 3


def test_nulls_of_a_table_are_no_keys(chats: Chats) -> None:
    rows = [[{**USER, "train": None, "name": "x"}, BOT], [USER, {**BOT, "train": False}, USER, BOT]]
    given = [{"messages": row, "text": None} for row in rows]
    assert chats.trained(*given, name="a.parquet") == [["b<|e|>"]] * 2


def test_a_begin_and_an_end_that_a_text_has_already(
    chats: Chats, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["<|s|>a<|end|>", "a<|end|>\n", "<|s|>a", "a"]
    rows = [{"text": text} for text in texts]
    source = FakeSource(None, bos="<|s|>")
    train = chats.run(*rows, source=source, special_tokens="allow").train
    samples = [train[index] for index in range(len(train))]
    shown = [decoded([*each.input_ids.tolist(), each.labels.tolist()[-1]]) for each in samples]
    assert shown == ["<|s|>a<|end|>", "<|s|>a<|end|>\n", "<|s|>a<|end|>", "<|s|>a<|end|>"]
    assert "3 rows with their own begin or end token, which got no second one" in caplog.text
