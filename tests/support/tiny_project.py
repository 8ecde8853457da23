"""A project as a user has it: a tokenizer, a text, and a recipe that trains a tiny model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerFast

from tests.stages.data.fakes import byte_tokenizer
from tests.support.runs import TINY

TEXT = "A stage is one step of a recipe, and a recipe is a chain of stages. " * 60
CHAIN: Mapping[str, Mapping[str, Any]] = {
    "model": {
        "use": "model.hf",
        "config": TINY | {"vocab_size": 260, "eos_token_id": 256},
        "tokenizer": "./tokenizer",
    },
    "precision": {"use": "precision.policy", "compute": "fp32"},
    "data": {
        "use": "data.text", "files": "./text.txt", "sequence_length": 16,
        "heldout_fraction": 0.05, "cache": "./cache",
    },
    "optimizer": {"use": "optimizer.adamw", "lr": 0.01},
    "wrap": {"use": "wrap.ddp"},
    "checkpoint": {"use": "checkpoint.sharded", "every": 4, "keep": 2},
    "train": {
        "use": "train.causal_lm", "steps": 8, "global_batch_size": 4, "micro_batch_size": 1,
        "log_every": 2, "eval_every": 4,
        "generate": {"prompts": ["A stage", "a recipe"], "every": 4, "max_tokens": 4},
    },
    "consolidate": {"use": "consolidate.stream"},
    "export": {"use": "export.safetensors"},
}  # fmt: skip


def tiny_project(folder: Path, **before: Mapping[str, Any]) -> Path:
    """Write tokenizer, text and recipe into a folder; return the recipe. Slots that are given come
    before the usual ones."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return write_recipe(folder / "tiny.yaml", **before)


def write_recipe(file: Path, **before: Mapping[str, Any]) -> Path:
    """Write the recipe of two processes; slots that are given come before the usual ones."""
    launch = {"procs": 2, "device": "cpu", "threads": 1, "restarts": {"limit": 0}}
    stages = {slot: dict(fields) for slot, fields in {**before, **CHAIN}.items()}
    recipe = {"name": "tiny", "launch": launch, "stages": stages}
    file.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return file
