"""Texts while training: the same under every strategy, and without influence on the training."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline import Progress, StageError, StepCallback
from pipeline.contracts.engine import DataAxis
from pipeline.contracts.metrics import records
from pipeline.contracts.objective import Scores
from pipeline.distributed.process_group import DistContext
from pipeline.distributed.signals import Interrupted
from pipeline.testing import plan_view
from pipeline.utils.files import private_folder
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.model.hf import HfModel
from stages.optimizer.adamw import AdamW
from stages.train.causal_lm import TrainCausalLm
from stages.train.evaluation import NextToken, TextGenerator
from stages.train.settings import EarlyStopping, Generation
from tests.support.batches import micro_batch
from tests.support.processes import run_ranks
from tests.support.runs import TINY, context, toy_data
from tests.support.state import Setting, make_engine, source
from tests.support.tier import spread

LAYOUTS = [
    ("ddp", 1),
    ("ddp", 2),
    ("fsdp full", 2),
    ("fsdp tensor", 2),
    ("fsdp context", 2),
    ("fsdp pipeline", 2),
    ("zero3", 2),
]
PROMPTS = ((5, 6, 7), (8,))


class Letters:
    """A tokenizer whose tokens are numbers apart from each other."""

    eos_token_id = 100
    pad_token_id = 0
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


class StopAt(StepCallback):
    """Sends this process a signal behind an update, or has lost patience behind an evaluation, if
    it is not step 0."""

    def __init__(self, step: int, early: int) -> None:
        self.step, self.early = step, early

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_evaluation(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        if step == self.early:
            progress.patience["evaluations"] = 1


class EndsAtOnce(StepCallback):
    """Ends the training before the first step."""

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        pass

    def reason_to_end(self) -> str:
        return "enough"


def train(
    dist: DistContext, folder: str, wrap: str, generate: Generation | None, stop: int = 0,
    early: int = 0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train four steps, or until a signal comes behind step `stop` (-1: none at all), or stop early
    behind step `early`; returns the records of the run."""
    private_folder(Path(folder))
    ctx, setting = context(dist, folder), Setting(wrap=wrap)
    plan = AdamW(schedule="constant", warmup_steps=0, lr=0.05).run(ctx)
    engine = make_engine(ctx, setting, plan)
    checkpoints = ShardedCheckpoint().run(ctx, engine)
    model = source(ctx, setting)
    model.tokenizer = Letters  # type: ignore[method-assign]
    loop = TrainCausalLm(
        global_batch_size=4,
        micro_batch_size=1,
        steps=4,
        eval_every=early or None,
        eval_last=False,
        early_stopping=EarlyStopping(patience=1),
        generate=generate,
    )
    callback = EndsAtOnce() if stop < 0 else StopAt(stop, early)
    with contextlib.suppress(Interrupted):
        loop.run(ctx, engine, toy_data(), plan, checkpoints, model, callback)
    checkpoints.close()
    engine.close()
    return list(records(ctx.run_dir / "metrics.jsonl"))


def settings(temperature: float) -> Generation:
    prompts = tuple(" ".join(map(str, ids)) for ids in PROMPTS)
    return Generation(prompts=prompts, every=2, max_tokens=5, temperature=temperature)


def texts(found: list[dict[str, Any]]) -> dict[int, list[str]]:
    return {r["step"]: [one["text"] for one in r["generated"]] for r in found if "generated" in r}


@pytest.mark.parametrize("temperature", spread([1.0, 0.0], 1))
def test_every_strategy_writes_the_same(temperature: float, tmp_path: Path) -> None:
    written = {}
    for wrap, ranks in LAYOUTS:
        folder = str(tmp_path / f"{wrap} {ranks}")
        written[wrap, ranks] = texts(
            run_ranks(train, ranks, folder, wrap, settings(temperature))[0]
        )
    expected = written["ddp", 1]
    assert list(expected) == [2, 4]
    assert all(len(text.split()) <= 5 and text for one in expected.values() for text in one)
    assert {layout: found for layout, found in written.items() if found != expected} == {}


@pytest.mark.parametrize(
    ("stop", "at"),
    [
        pytest.param(1, 2, id="before texts", marks=pytest.mark.full),
        pytest.param(2, 2, id="between tokens"),
        pytest.param(3, 4, id="before the last texts", marks=pytest.mark.full),
        pytest.param(4, 4, id="between the last tokens"),
    ],
)
def test_a_stop_puts_texts_off(stop: int, at: int, tmp_path: Path) -> None:
    """The signal is seen at the next step, or by the first token behind it."""
    through = run_ranks(train, 1, str(tmp_path / "through"), "ddp", settings(1.0))[0]
    run = str(tmp_path / "run")
    stopped = run_ranks(train, 1, run, "ddp", settings(1.0), stop)[0]
    assert max(line["step"] for line in stopped) == at
    assert list(texts(stopped)) == [step for step in (2, 4) if step < at]
    resumed = run_ranks(train, 1, run, "ddp", settings(1.0))[0]
    assert texts(resumed) == texts(through)
    assert len(texts(through)) == 2
    again = run_ranks(train, 1, run, "ddp", settings(1.0))[0]
    assert again == resumed


def test_training_that_stops_early_ends_with_texts(tmp_path: Path) -> None:
    found = run_ranks(train, 1, str(tmp_path / "run"), "ddp", settings(1.0), 0, 3)[0]
    assert max(line["step"] for line in found) == 3
    assert list(texts(found)) == [2, 3]


def test_texts_before_training_are_written_once_and_change_nothing(tmp_path: Path) -> None:
    before = Generation(prompts=settings(1.0).prompts, first=True, max_tokens=5)
    run = str(tmp_path / "run")
    ended = run_ranks(train, 2, run, "fsdp full", before, -1)[0]
    assert list(texts(ended)) == [0]
    resumed = run_ranks(train, 2, run, "fsdp full", before)[0]
    assert [line["step"] for line in resumed if "generated" in line] == [0, 4]
    assert texts(resumed)[0] == texts(ended)[0] != texts(resumed)[4]
    plain = run_ranks(train, 2, str(tmp_path / "plain"), "fsdp full", None)[0]
    found = [[(r["loss"], r["grad_norm"]) for r in one if "loss" in r] for one in (resumed, plain)]
    assert found[0] == found[1]
    assert len(found[0]) == 4


def chosen(temperature: float, seed: int) -> int:
    scores = Scores(logits=torch.tensor([[2.0, 0.0, 1.0]]))
    ids = torch.zeros(1, 2).long()
    batch = micro_batch(ids, ids, rows={"number": torch.tensor([3])})
    return int(NextToken(temperature, (seed,))(scores, batch))


def test_a_temperature_of_zero_takes_the_most_probable_token() -> None:
    assert chosen(0.0, 0) == 0


def test_tokens_are_drawn_as_often_as_the_model_says() -> None:
    """Within four standard deviations of 2,000 draws."""
    draws = torch.tensor([chosen(1.0, seed) for seed in range(2000)])
    shares = torch.bincount(draws, minlength=3) / len(draws)
    expected = torch.softmax(torch.tensor([2.0, 0.0, 1.0]), 0)
    assert (shares - expected).abs().max() < 4 * (0.25 / len(draws)) ** 0.5


class Fixed:
    """An engine on one rank with tokens of its own: 100, which ends a text, for the first prompt,
    unless it goes `on`, and 50."""

    device = torch.device("cpu")
    data_axis = DataAxis(index=0, count=1)

    def __init__(self, on: bool) -> None:
        self.on, self.lengths = on, list[int]()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def evaluate(self, batches: Any, chooser: NextToken) -> Iterator[torch.Tensor]:
        for batch in batches:
            self.lengths.append(batch.input_ids.shape[1])
            ends = int(batch.rows["number"]) == 0 and not self.on
            yield torch.tensor([[100 if ends else 50]])


class Refusing(Letters):
    """A tokenizer whose template wants a system message first."""

    chat_template = "a template"

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        raise ValueError("a system message comes first")


def generator(made: Generation, most: int | None = None, tokenizer: Any = Letters) -> TextGenerator:
    model: Any = SimpleNamespace(name="the model", tokenizer=tokenizer, most_positions=most)
    return TextGenerator(made, model, seed=0)


def test_a_text_ends_at_its_end() -> None:
    engine: Any = Fixed(on=False)
    found = generator(settings(0.0)).generate(engine, DistContext(device=engine.device), 1)
    assert found is not None
    assert [one["text"] for one in found] == ["100", "50 50 50 50 50"]
    assert engine.lengths == [64] * 6


def test_no_padding_goes_beyond_the_positions() -> None:
    engine: Any = Fixed(on=True)
    made = Generation(prompts=("1 2 3",), every=1, max_tokens=68)
    assert generator(made, 70).generate(engine, DistContext(device=engine.device), 1)
    assert engine.lengths == [64] * 62 + [70] * 6


@pytest.mark.parametrize(
    ("fields", "most", "tokenizer", "message"),
    [
        ({"chat": True}, None, Letters, "the tokenizer of the model has no chat template"),
        ({"chat": True}, None, Refusing,
         "the chat template refuses prompt '5': a system message comes first"),
        ({"prompts": ("5", "")}, None, Letters, "prompt '' has no tokens"),
        ({"prompts": ("1 2 3", "4"), "max_tokens": 62}, 63, Letters,
         "the text of prompt '1 2 3' may have 64 tokens, and the model has 63 positions"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_written(
    fields: dict[str, Any], most: int | None, tokenizer: Any, message: str
) -> None:
    made = Generation(**{"prompts": ("5",), "every": 1, **fields})
    with pytest.raises(StageError, match=re.escape(f"generate: {message}")):
        generator(made, most, tokenizer)


GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 50}


@pytest.mark.parametrize(
    ("config", "fields", "expected"),
    [
        (GPT2, {"max_tokens": 1024}, []),
        ({**GPT2, "n_positions": 63}, {"max_tokens": 63}, []),
        ({**GPT2, "n_positions": 63}, {},
         ["generate.max_tokens: is 64, and the model has 63 positions"]),
        ({"model_type": "llama", "max_position_embeddings": 8}, {}, []),
        (GPT2, {"chat": True}, ["generate: needs a chat template, and the tokenizer of"]),
    ],
)  # fmt: skip
def test_what_shows_before_a_start(
    config: dict[str, Any], fields: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").touch()
    generate = Generation(**{"prompts": ("5",), "every": 1, **fields})
    stage = TrainCausalLm(global_batch_size=1, steps=1, generate=generate)
    model = HfModel(config=config, tokenizer=str(tmp_path))
    view = plan_view({"model": model, "train": stage})
    said = [f"{one.key}: {one.message}" for one in stage.check(view)]
    assert len(said) == len(expected)
    assert all(one.startswith(begin) for one, begin in zip(said, expected, strict=True))


def test_the_table_of_positions_of_a_model(tmp_path: Path) -> None:
    ctx = context(DistContext(device=torch.device("cpu")), tmp_path)
    tables = [GPT2 | {"n_positions": 63}, GPT2, TINY]
    found = [HfModel(config=config, init="random").run(ctx).most_positions for config in tables]
    assert found == [63, 1024, None]
