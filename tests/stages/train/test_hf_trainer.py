"""Refusals of train.hf_trainer, and a recipe with it from model to export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.testing import plan_view, problems
from stages.checkpoint.sharded import ShardedCheckpoint
from stages.precision.policy import PrecisionPolicy
from stages.train.hf_trainer import FREE, HfTrainer
from stages.wrap.ddp import Ddp
from tests.support.models import save_tokenizer, tiny_llama_config
from tests.support.processes import run_ranks
from tests.support.recipes import run_recipe

FIELDS = {"global_batch_size": 8, "steps": 4}


def said(fields: dict[str, Any], **slots: Any) -> list[str]:
    found = problems(HfTrainer, {**FIELDS, **fields}, plan=plan_view(slots))
    return [f"{problem.key}: {problem.message} ({problem.hint})" for problem in found]


@pytest.mark.parametrize("name", ["learning_rate", "bf16", "save_steps", "push_to_hub", "tokens"])
def test_arguments_that_are_decided_elsewhere_or_unknown(name: str) -> None:
    (problem,) = said({"arguments": {name: 1}})
    message = "is not a TrainingArgument, or is set by a slot of the recipe"
    assert problem.startswith(f"arguments.{name}: {message}")


def test_unknown_arguments() -> None:
    assert said({"arguments": {"torch_compil": True}}) == [
        "arguments.torch_compil: is not a TrainingArgument, or is set by a slot of the recipe (did "
        "you mean `torch_compile`?)"
    ]


def test_arguments_that_are_free_are_fields_of_the_installed_version() -> None:
    import dataclasses

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


@pytest.mark.parametrize("adapter", [None, LORA, {**LORA, "quantize": "nf4"}])
@pytest.mark.parametrize("export", ["export.safetensors", "export.adapter"])
def test_from_model_to_export(adapter: Any, export: str, tmp_path: Path) -> None:
    if adapter is None and export == "export.adapter":
        return  # there is no adapter to export
    text, recipe, run = tmp_path / "text.txt", tmp_path / "recipe.yaml", tmp_path / "run"
    text.write_text("a b c a b b c a\n" * 40, encoding="utf-8")
    save_tokenizer(tmp_path / "tokenizer")
    run.mkdir()
    train = {"use": "train.hf_trainer", "epochs": 0.5, "global_batch_size": 4, "keep": 1}
    more = {"micro_batch_size": 1, "save_every": 2, "arguments": {"activation_checkpointing": True}}
    model = {"config": tiny_llama_config(), "tokenizer": str(tmp_path / "tokenizer")}
    stages = {
        "model": {"use": "model.hf", **model},
        **({"adapter": adapter} if adapter else {}),
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {
            "use": "data.text", "files": [str(text)], "sequence_length": 8,
            "cache": str(tmp_path), "heldout_fraction": 0.1,
        },
        "optimizer": {"use": "optimizer.adamw"},
        "train": {**train, **more},
        "consolidate": {"use": "consolidate.stream"},
        "export": {"use": export},
    }  # fmt: skip
    launch = {"procs": 2, "device": "cpu"}
    recipe.write_text(json.dumps({"name": "t", "launch": launch, "stages": stages}))
    run_ranks(run_recipe, 2, str(recipe), str(run))
    kind = "adapter_model" if export == "export.adapter" else "model"
    assert (run / "export" / f"{kind}.safetensors").is_file()
    (checkpoint,) = (run / "checkpoints").iterdir()
    progress = json.loads((checkpoint / "progress.json").read_text())
    assert checkpoint.name == f"checkpoint-{progress['step']}"
    # half of 36 blocks, four at a time: the last step has two
    assert (progress["step"], progress["samples"], progress["tokens"]) == (5, 18, 144)
    assert "eval_loss" in progress["metrics"]
