"""What `pipe init` and `pipe advise` choose by the data: numbers by the number of rows, and what a
look at files of each form finds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PipeError
from pipeline.execution.in_process import scratch_context
from pipeline.planning import AdviceRequest
from stages import finetune_data
from stages.finetune import finetune
from stages.finetune_choices import Broken, DataSurvey, choose
from stages.finetune_data import survey
from tests.pipeline.conftest import TinyRun, plugin, tiny_run

__all__ = ["plugin", "tiny_run"]


def looked(rows: int, length: int = 200, **more: Any) -> DataSurvey:
    """Return a survey of rows that are all of one length."""
    known: dict[str, Any] = {"name": "x.jsonl", "form": "chat messages", "rows": rows}
    return DataSurvey(**{**known, "lengths": [length] * min(rows, 100), **more})


def asked(**more: Any) -> AdviceRequest:
    known: dict[str, Any] = {
        "name": "x", "model": {"config": {"model_type": "llama"}}, "data": Path("x.jsonl"),
        "lora": False, "sequence": None, "global_batch": None, "micro_batch": None, "ranks": 1,
        "on_gpus": False, "compute": "fp32",
    }  # fmt: skip
    return AdviceRequest(**known | more)


TABLE = {
    10: (9, 1, 3, 4, 7, 1, 1),
    300: (285, 15, 3, 8, 107, 10, 20),
    5_000: (4_750, 250, 3, 64, 223, 20, 40),
    200_000: (199_000, 1_000, 1, 64, 3_110, 300, 600),
    1_000_000: (999_000, 1_000, 1, 64, 15_610, 1_500, 3_000),
}
"""Rows -> samples, held out, epochs, batch, steps, steps between evaluations and checkpoints."""


@pytest.mark.parametrize("rows", TABLE)
def test_numbers_by_the_number_of_rows(rows: int) -> None:
    found = choose(looked(rows), sequence=None, batch=None, ranks=1)
    numbers = (found.samples, found.held, found.epochs, found.batch, found.steps)
    assert (*numbers, found.eval_every, found.save_every) == TABLE[rows]
    assert found.sequence == 256
    assert found.bad_rows == "error"


@given(rows=st.integers(1, 3_000_000), length=st.integers(2, 9_000), ranks=st.integers(1, 512))
def test_every_training_is_evaluated_and_saved(rows: int, length: int, ranks: int) -> None:
    found = choose(looked(rows, length), sequence=None, batch=None, ranks=ranks)
    assert found.samples + found.held == rows
    if rows == 1:
        assert (found.held, found.fraction, found.eval_every) == (0, 0.0, None)
    else:
        assert found.eval_every is not None
        assert 1 <= found.eval_every <= max(1, found.steps // 5)
        assert found.save_every % found.eval_every == 0
        assert 1 <= found.held <= max(1, rows // 10)
        assert found.held == max(1, round(rows * found.fraction))
    assert 1 <= found.save_every <= found.steps
    assert found.batch % ranks == 0
    assert found.epochs * found.samples < 100_000 or found.epochs == 1
    assert found.sequence <= 4096
    assert found.sequence >= min(length, 4096)


def test_what_is_asked_for_stays() -> None:
    found = choose(looked(300), sequence=100, batch=30, ranks=8)
    assert (found.sequence, found.batch, found.steps) == (100, 30, 29)
    assert found.why["sequence_length"].endswith("300 rows are longer and cut")
    assert found.why["global_batch_size"] == "10 steps an epoch, 29 steps in all, as asked"


@pytest.mark.parametrize(
    ("lengths", "sequence", "why"),
    [
        ([100] * 98 + [120] * 2, 128, "all rows fit"),
        ([100] * 98 + [150, 3000], 192, "covers 99 % of the rows; 1 row is longer and cut"),
        ([100] * 95 + [900] * 5, 128, "covers 95 % of the rows; 5 rows are longer and cut"),
        ([6000] * 100, 4096, "covers 0 % of the rows; 100 rows are longer and cut"),
    ],
)
def test_the_sequence_covers_most_rows(lengths: list[int], sequence: int, why: str) -> None:
    found = choose(looked(100, lengths=lengths), sequence=None, batch=None, ranks=1)
    assert (found.sequence, found.why["sequence_length"]) == (sequence, why)


def test_a_model_of_short_texts() -> None:
    found = choose(looked(100, 900, positions=512), sequence=None, batch=None, ranks=1)
    assert found.sequence == 512


@pytest.mark.parametrize(
    ("rows", "sequence", "steps"), [(30, 64, 67), (5_000, 2048, 88), (1_000_000, 2048, 1_511)]
)
def test_running_text_is_cut_into_blocks(rows: int, sequence: int, steps: int) -> None:
    found = choose(looked(rows, running=True), sequence=None, batch=None, ranks=1)
    assert (found.sequence, found.steps) == (sequence, steps)


def test_broken_rows_are_left_out() -> None:
    of = looked(300, broken=(Broken("not JSON", 4, "x:3"), Broken("has ['a']", 3, "x:9")))
    found = choose(of, sequence=None, batch=None, ranks=1)
    assert (found.bad_rows, found.samples) == ("drop", 278)
    assert list(of.lines())[:3] == [
        "data: 300 rows of chat messages in x.jsonl, 7 of them broken",
        "  4 rows: not JSON (first: x:3)",
        "  3 rows: has ['a'] (first: x:9)",
    ]
    unread = choose(looked(300_000, all_read=False), sequence=None, batch=None, ranks=1)
    assert unread.bad_rows == "drop"


FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "chat messages": lambda text: {
        "messages": [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": text}]
    },
    "prompts and completions": lambda text: {"prompt": "Hm?", "completion": text},
    "Alpaca instructions": lambda text: {"instruction": "Hm?", "output": text},
    "ShareGPT conversations": lambda text: {
        "conversations": [{"from": "human", "value": "Hm?"}, {"from": "gpt", "value": text}]
    },
    "text": lambda text: {"text": text},
}


@pytest.fixture(scope="session")
def model(tiny_run: TinyRun) -> dict[str, str]:
    """Return fields of a tiny model's slot; its tokenizer makes bytes of texts."""
    return {"path": str(tiny_run.folder / "export")}


def look(model: dict[str, str], file: Path) -> DataSurvey:
    with scratch_context(logging.Logger("test")) as ctx:
        return survey(ctx, model, file)


def written(file: Path, rows: Iterator[dict[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.mark.parametrize("form", FORMS)
def test_a_look_at_each_form(form: str, model: dict[str, str], tmp_path: Path) -> None:
    rows = (FORMS[form]("a" * count) for count in range(1, 21))
    file = written(tmp_path / "x.jsonl", rows)
    with file.open("a") as more:
        more.write('{"messages": \n{"other": 1}\n')
    found = look(model, file)
    assert (found.form, found.rows, found.usable, found.running) == (form, 22, 20, form == "text")
    assert found.all_read
    apart = [two - one for one, two in zip(found.lengths, found.lengths[1:], strict=False)]
    assert apart == [1] * 19  # a token for each byte
    assert [(one.number, one.first) for one in found.broken] == [
        (1, "x.jsonl:21"),
        (1, "x.jsonl:22"),
    ]
    assert found.template == (None if form == "text" else "plain")
    assert found.prompt == (None if form == "text" else "Hm?")
    assert found.parameters is not None
    assert 10_000 < found.parameters < 1_000_000
    low_rank, why = finetune.prefers_low_rank(found)
    assert not low_rank
    assert why.endswith("parameters, all weights can be trained")


def test_empty_answers_are_counted(model: dict[str, str], tmp_path: Path) -> None:
    makes = FORMS["chat messages"]
    file = written(tmp_path / "x.jsonl", map(makes, ["a", "", "b", "", "c"]))
    found = look(model, file)
    assert (found.usable, len(found.lengths), found.broken) == (5, 5, ())
    assert [*found.lines()][1] == (
        "  2 rows with an empty answer, which is trained as the end of a turn; `data.empty: drop` "
        "leaves them out (first: x.jsonl:2)"
    )
    assert look(model, written(file, map(makes, "ab"))).empty is None


GIGA = 1_000_000_000


@pytest.mark.parametrize(
    ("lora", "size", "rate"),
    [
        (False, GIGA // 2, 1e-4), (False, 8 * GIGA, 2e-5), (False, None, 2e-5),
        (True, GIGA // 2, 2e-4), (True, 8 * GIGA, 2e-4), (True, 70 * GIGA, 1e-4),
        (True, None, 1e-4),
    ],
)  # fmt: skip
def test_rates_by_size(lora: bool, size: int | None, rate: float) -> None:
    survey = looked(300, parameters=size)
    request = asked(lora=lora, ranks=4, on_gpus=True, compute="bf16", survey=survey)
    slots = finetune(request)
    assert slots["optimizer"]["lr"] == rate
    lines = [*finetune.explained(request, slots)]
    assert sum(line.startswith(f"lr {rate:g}: ") for line in lines) == 1
    assert ("lora: rank 16, alpha 32: updates are multiplied by alpha / rank = 2" in lines) == lora
    assert "procs 4: one for each GPU" in lines
    assert "compute bf16: these GPUs compute in it at full speed" in lines
    assert [line for line in lines if line.startswith("weight_decay ")] == [
        "weight_decay 0: LoRA has few weights to decay" if lora
        else "weight_decay 0.1: all weights (0 for LoRA)"
    ]  # fmt: skip


def test_the_question_is_short_opens_a_conversation_and_can_stand_in_a_recipe(
    model: dict[str, str], tmp_path: Path
) -> None:
    def chat(*messages: tuple[str, str]) -> dict[str, Any]:
        turns = [{"role": role, "content": text} for role, text in messages]
        return {"messages": [*turns, {"role": "assistant", "content": "Yes."}]}

    unfit = [chat(("user", "x" * 401)), chat(("user", "${HOME}?")), chat(("user", "???")),
             chat(("user", "./run.sh fails")), chat(("user", "../x?")),
             chat(("system", "Be brief."), ("user", "So?"))]  # fmt: skip
    assert look(model, written(tmp_path / "no.jsonl", iter(unfit))).prompt is None
    rows = [*unfit, chat(("user", "Now?")), chat(("user", "Later?"))]
    assert look(model, written(tmp_path / "x.jsonl", iter(rows))).prompt == "Now?"


@pytest.mark.parametrize(
    ("parameters", "positions", "asks"),
    [(8_000_000_000, 8192, True), (8_000_000_000, None, True), (70_000_000_000, 8192, False),
     (None, 8192, False), (1_000_000, 512, False)],
)  # fmt: skip
def test_the_recipe_asks_small_models(
    parameters: int | None, positions: int | None, asks: bool, model: dict[str, str], tmp_path: Path
) -> None:
    of = looked(300, prompt="Hm?", parameters=parameters, positions=positions)
    request = asked(model=model, lora=True, survey=of, folder=tmp_path, reasons=())
    slots = finetune(request)
    prompted = {"prompts": ["Hm?"], "chat": True, "first": True, "max_tokens": 64}
    assert slots["train"].get("generate") == (prompted if asks else None)
    told = "generate: a question from the data, answered before and after training"
    assert (told in finetune.explained(request, slots)) == asks


def test_many_rows_are_measured_by_some(model: dict[str, str], tmp_path: Path) -> None:
    rows = (FORMS["chat messages"]("a" * (5 + number % 10)) for number in range(50_000))
    found = look(model, written(tmp_path / "x.jsonl", rows))
    assert found.rows == found.usable == 50_000
    assert 10_000 <= len(found.lengths) <= 20_000
    assert not found.all_read
    assert found.lengths[-1] - found.lengths[0] == 9
    exact = 50_000 * (found.lengths[0] + 4.5)
    assert found.tokens == pytest.approx(exact, rel=0.01)
    assert "measured on" in list(found.lines())[-1]


def test_plain_text(model: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("abcd" * 1000)
    found = look(model, tmp_path / "x.txt")
    assert (found.running, found.lengths) == (True, [4001])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no row in this file"),
        ('{"a": 1}\n' * 3, r"no row of .*x.jsonl can be trained on: "),
        ('{"text": ""}\n' * 3, r"no row of .*x.jsonl can be trained on: "),
        ('{"messages": [{"role": "user", "content": "Hm?"}]}\n' * 3,
         r"no row of .*x.jsonl can be trained on: "),
    ],
)  # fmt: skip
def test_nothing_to_train_on(
    content: str, message: str, model: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(PipeError, match=message):
        look(model, tmp_path / "x.jsonl")


def test_rows_that_are_larger_than_what_is_kept(
    model: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_data, "MOST_CHARACTERS", 100)
    for count in range(1, 30):
        file = written(tmp_path / "x.jsonl", (FORMS["text"]("a" * 1000) for _ in range(count)))
        found = look(model, file)
        assert found.rows == found.usable == count
        assert set(found.lengths) == {1001}
        assert not found.all_read


def test_a_tokenizer_that_cannot_be_had(tmp_path: Path) -> None:
    file = written(tmp_path / "x.jsonl", (FORMS["text"]("a" * 400) for _ in range(10)))
    found = look({"path": "meta-llama/Llama-3.1-8B"}, file)
    assert found.lengths == [108] * 10
    assert list(found.lines())[1:] == [
        "tokens: about 1,080; a row has 108 (median), 108 (95 %), 108 (longest); 4 characters "
        "count as a token",
        f"  the model's tokenizer cannot be read: {found.guessed}",
    ]
    assert found.guessed.startswith("meta-llama/Llama-3.1-8B: this machine's cache")
    assert finetune.prefers_low_rank(found) == (
        True, "low-rank updates of 8B parameters take a fraction of their memory",
    )  # fmt: skip


def test_files_are_named_from_the_recipe(tmp_path: Path) -> None:
    request = asked(folder=tmp_path / "a" / "b")
    assert request.named(str(tmp_path / "a" / "b" / "c" / "x")) == "./c/x"
    assert request.named(str(tmp_path / "a" / "x")) == "../x"
    assert request.named("/elsewhere/x") == "/elsewhere/x"
    assert request.named("owner/name") == "owner/name"
