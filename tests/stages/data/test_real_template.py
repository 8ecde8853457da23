"""The tokenizer and template of the model that the recipes train (recipes/fetch_smollm.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.contracts.data import NO_TARGET
from pipeline.contracts.stage import Context
from stages.data.chat import ChatData
from stages.model.hf import HfModel

RECIPES = Path(__file__).parents[3] / "recipes"
MODEL = RECIPES / "models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize("packing", [False, True])
def test_targets_are_what_the_assistant_says(ctx: Context, tmp_path: Path, packing: bool) -> None:
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
    assert len(data.train) == (7 if packing else len(rows))
