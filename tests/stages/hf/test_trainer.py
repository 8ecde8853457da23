"""Refusals of train.hf_trainer, and a recipe with it from model to export."""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline import DataError, DistContext, Progress, StepCallback
from pipeline.contracts.metrics import OWN, records
from pipeline.testing import plan_view, problems
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.hf.trainer import FREE, HfTrainer
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.wrap.ddp import Ddp
from tests.support.models import save_tokenizer, tiny_llama_config
from tests.support.pipe import Pipe
from tests.support.processes import run_ranks
from tests.support.recipes import run_recipe
from tests.support.runs import context, tiny_model, toy_data

FIELDS = {"global_batch_size": 8, "steps": 4}


def said(fields: dict[str, Any], **slots: Any) -> list[str]:
    found = problems(HfTrainer, {**FIELDS, **fields}, plan=plan_view(slots))
    return [f"{problem.key}: {problem.message} ({problem.hint})" for problem in found]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *((name, "") for name in ("learning_rate", "bf16", "save_steps", "push_to_hub", "tokens")),
        ("torch_compil", "(did you mean `torch_compile`?)"),
        ("report_to", "(add a slot before train, such as track: {use: track.wandb})"),
    ],
)
def test_arguments_that_are_decided_elsewhere_or_unknown(name: str, hint: str) -> None:
    (problem,) = said({"arguments": {name: 1}})
    message = "is not a TrainingArgument, or is set by a slot of the recipe"
    assert problem.startswith(f"arguments.{name}: {message}")
    assert problem.endswith(hint)


def test_arguments_that_are_free_are_fields_of_the_installed_version() -> None:
    from transformers import TrainingArguments

    assert {field.name for field in dataclasses.fields(TrainingArguments)} >= FREE
    assert said({"arguments": dict.fromkeys(FREE, None)}) == []


def test_other_slots() -> None:
    assert said({}, precision=PrecisionPolicy(compute="fp16")) == [
        "arguments: the Trainer scales losses under autocast only (set compute: bf16)"
    ]
    assert said({}, precision=PrecisionPolicy(reduce="bf16")) == [
        "arguments: the Trainer keeps fp32 weights and averages their gradients in fp32 (set "
        "master: fp32 and reduce: fp32 in the precision slot)"
    ]
    advice = "remove that slot, or use train.causal_lm"
    assert said({}, wrap=Ddp(), checkpoint=ShardedCheckpoint()) == [
        f"arguments: the Trainer does not use the wrap slot ({advice})",
        f"arguments: the Trainer does not use the checkpoint slot ({advice})",
    ]


LORA = {"use": "adapter.lora", "rank": 4}


def written(
    folder: Path, before: dict[str, Any], train: dict[str, Any], after: dict[str, Any]
) -> Path:
    """Write a recipe for two processes, with slots before the precision and behind `train`."""
    text, recipe, tokenizer = (folder / name for name in ("text.txt", "recipe.yaml", "tokenizer"))
    text.write_text("a b c a b b c a\n" * 40, encoding="utf-8")
    save_tokenizer(tokenizer)
    stages = {
        "model": {"use": "model.hf", "config": tiny_llama_config(), "tokenizer": str(tokenizer)},
        **before,
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {
            "use": "data.text", "files": [str(text)], "sequence_length": 8,
            "cache": str(folder), "heldout_fraction": 0.1,
        },
        "optimizer": {"use": "optimizer.adamw"},
        "train": {
            "use": "train.hf_trainer", "global_batch_size": 4, "micro_batch_size": 1,
            "arguments": {"activation_checkpointing": True}, **train,
        },
        **after,
    }  # fmt: skip
    launch = {"procs": 2, "device": "cpu"}
    recipe.write_text(json.dumps({"name": "t", "launch": launch, "stages": stages}), "utf-8")
    return recipe


@pytest.mark.parametrize("adapter", [None, LORA, {**LORA, "quantize": "nf4"}])
@pytest.mark.parametrize("export", ["export.safetensors", "export.adapter"])
def test_from_model_to_export(adapter: Any, export: str, tmp_path: Path) -> None:
    if adapter is None and export == "export.adapter":
        return  # there is no adapter to export
    run = tmp_path / "run"
    run.mkdir()
    train = {"epochs": 0.5, "keep": 1, "save_every": 2}
    after = {"consolidate": {"use": "consolidate.stream"}, "export": {"use": export}}
    recipe = written(tmp_path, {"adapter": adapter} if adapter else {}, train, after)
    run_ranks(run_recipe, 2, str(recipe), str(run))
    kind = "adapter_model" if export == "export.adapter" else "model"
    assert (run / "export" / f"{kind}.safetensors").is_file()
    (checkpoint,) = (run / "checkpoints").iterdir()
    progress = json.loads((checkpoint / "progress.json").read_text())
    assert checkpoint.name == f"checkpoint-{progress['step']}"
    # half of 36 blocks, four at a time: the last step has two
    assert (progress["step"], progress["samples"], progress["tokens"]) == (5, 18, 144)
    assert "eval_loss" in progress["metrics"]


def test_a_run_is_tracked_and_its_speeds_are_of_all_ranks(tmp_path: Path) -> None:
    file = tmp_path / "runs.sqlite"
    track = {"track": {"use": "track.sqlite", "file": str(file)}}
    recipe = written(tmp_path, track, {"steps": 5, "eval_every": 4}, {})
    pipe = Pipe(tmp_path, tmp_path)
    said = pipe.run(recipe)
    assert said.code == 0, said.stderr
    found = sqlite3.connect(file)
    assert found.execute("select name, outcome from runs").fetchall() == [("the run", "finished")]
    rows = found.execute("select step, name, value from metrics").fetchall()
    found.close()
    written_records = list(records(pipe.run_dir / "metrics.jsonl"))
    assert {name for record in written_records for name in record} <= OWN
    steps = [record for record in written_records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    rates = [1e-5 * 0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(5)]
    assert [record["lr"] for record in steps] == pytest.approx(rates)
    sent = {(step, name): value for step, name, value in rows}
    assert sorted(step for step, name, _ in rows if name == "eval/loss") == [4, 5]
    for record in steps:
        for name in ("loss", "grad_norm", "lr", "tokens_per_second", "step_seconds"):
            assert sent[record["step"], name] == record[name]
        seconds = record["step_seconds"]
        assert record["samples_per_second"] * seconds == pytest.approx(4)
        assert record["tokens_per_second"] * seconds == pytest.approx(4 * 8)
        assert record["tokens_per_second_per_rank"] * seconds == pytest.approx(2 * 8)
        assert record["target_tokens_per_second"] * seconds == pytest.approx(4 * 8)
        assert 0 <= record["data_wait_share"] < 1


class Enough(StepCallback):
    """Ends the training at a step, on one rank."""

    def __init__(self, at: int, asks: bool) -> None:
        self.at, self.asks, self.last = at, asks, 0

    def on_step(self, step: int, progress: Progress, record: Mapping[str, float]) -> None:
        self.last = step

    def reason_to_end(self) -> str:
        return f"step {self.last} is enough" if self.asks and self.last >= self.at else ""


def train_with(
    dist: DistContext, folder: str, callback: StepCallback | None, steps: int = 9, vocab: int = 101
) -> dict[str, Any]:
    ctx = context(dist, folder)
    plan = AdamW(lr=1e-3).run(ctx)
    precision = PrecisionPolicy(compute="fp32").run(ctx)
    stage = HfTrainer(global_batch_size=4, steps=steps, micro_batch_size=1)
    data, model = toy_data(vocab=vocab), tiny_model(ctx, {}, "")
    trained = stage.run(ctx, data, plan, precision, model, callback)
    return {"lines": list(records(ctx.run_dir / "metrics.jsonl")), **trained.record()}


def train_until_an_end(dist: DistContext, folder: str) -> list[dict[str, Any]]:
    """Train until rank 1 ends it, and resume, when no rank asks. End a training before
    its first step; resume it with and without the callback; train the same at once."""
    with pytest.raises(DataError, match="the model embeds 101"):
        train_with(dist, f"{folder}/odd", Enough(0, True), vocab=300)
    first = [train_with(dist, folder, Enough(2, asks)) for asks in (dist.rank == 1, False)]
    ended = f"{folder}/ended"
    return [
        *first,
        train_with(dist, ended, Enough(0, dist.rank == 1), steps=2),
        train_with(dist, ended, Enough(0, False), steps=2),
        train_with(dist, ended, None, steps=2),
        train_with(dist, f"{folder}/whole", None, steps=2),
        train_with(dist, ended, Enough(0, True), steps=2),
    ]


def test_a_callback_ends_the_training_of_all_ranks(tmp_path: Path) -> None:
    def at(told: dict[str, Any], name: str) -> list[int]:
        return [line["step"] for line in told["lines"] if name in line]

    for told in run_ranks(train_until_an_end, 2, str(tmp_path)):
        for first, again, step in ((told[0], told[1], 2), (told[2], told[3], 0)):
            assert first["progress"]["step"] == step
            assert first["progress"]["stopped"] == f"step {step} is enough"
            assert first["checkpoint"].endswith(f"checkpoint-{step}")
            assert at(first, "eval_loss") == at(first, "ended_early") == [step]
            assert again == first
        on, whole, over = told[4:]
        losses = [[line["loss"] for line in one["lines"] if "loss" in line] for one in (on, whole)]
        assert losses[0] == losses[1]
        assert len(losses[0]) == 2
        # a training that is over cannot be ended
        assert (over["progress"]["step"], over["progress"]["stopped"]) == (2, "")
        assert over["lines"] == on["lines"]
