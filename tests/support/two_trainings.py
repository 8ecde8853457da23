"""Recipes of two trainings on a tiny pretrained model: on a text, then on chats."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.models import tiny_llama_config
from tests.support.tiny_recipe import Stages

WORDS = [f"w{number}" for number in range(60)]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} </s> {% endfor %}"
TEXT = {"use": "data.text", "files": "./text.txt", "sequence_length": 16}
CHATS = {"use": "data.chat", "files": "./chats.jsonl", "sequence_length": 32}
LORA = {"use": "adapter.lora", "rank": 2, "targets": "all-linear"}


def write_files(folder: Path) -> Path:
    """Write a tiny pretrained model with a tokenizer, a text, and chats into a folder; return
    that."""
    special = ["<unk>", "<s>", "</s>", "<pad>", "user:", "assistant:"]
    numbers = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        pad_token="<pad>",
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**tiny_llama_config())).save_pretrained(folder / "model")
    drawn = random.Random(0)
    documents = [" ".join(drawn.choices(WORDS, k=40)) for _ in range(60)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(60):
            turns = {role: " ".join(drawn.choices(WORDS, k=3)) for role in ("user", "assistant")}
            row = {"messages": [{"role": role, "content": text} for role, text in turns.items()]}
            file.write(f"{json.dumps(row)}\n")
    return folder


def one(data: Mapping[str, Any], wrap: str, steps: int, name: str = "") -> Stages:
    """Return the slots of a training on the model of the latest slot; their names end in `name`."""
    return {
        f"data{name}": dict(data),
        f"wrap{name}": {"use": wrap},
        f"checkpoint{name}": {"use": "checkpoint.sharded", "every": 2},
        f"train{name}": {
            "use": "train.causal_lm", "steps": steps, "global_batch_size": 4, "log_every": 1,
        },
    }  # fmt: skip


def begin(path: str, adapter: Mapping[str, Any] | None = None) -> Stages:
    """Return the slots that both trainings share."""
    return {
        "model": {"use": "model.hf", "path": path},
        **({"adapter": dict(adapter)} if adapter else {}),
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "optimizer": {"use": "optimizer.adamw", "lr": 0.01},
    }
