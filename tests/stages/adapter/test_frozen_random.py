"""Random weights that an adapter would leave frozen while data train on them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pipeline.contracts.stage import PlanView
from stages.adapter.lora import Lora
from stages.model.hf import HfModel
from tests.stages.data.fakes import FakeSource

BOTH = ("*embed_tokens.weight", "lm_head.weight")


def problems(model: HfModel, **fields: object) -> list[str]:
    """Return the mistakes of an adapter's `train_also`."""
    stage = dataclasses.replace(Lora(), **fields)  # type: ignore[arg-type]
    view = PlanView(
        name="r", seed=0, procs=1, device="cpu", slots={"model": model, "adapter": stage}
    )
    return [p.message for p in stage.check(view) if p.key == "train_also"]


def model(folder: Path, rows: int, *, tied: bool = False, **fields: object) -> HfModel:
    """Return a slot of a model with `rows` rows, whose tokenizer has ids up to 258."""
    config = {"model_type": "llama", "vocab_size": rows, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    FakeSource().fast.save_pretrained(folder)
    return HfModel(path=str(folder), **fields)  # type: ignore[arg-type]


def test_new_rows_that_the_tokenizer_uses(tmp_path: Path) -> None:
    grown = model(tmp_path, 257, vocab_size=320)
    [message] = problems(grown)
    assert message == (
        "2 rows of the vocabulary are new and random, and stay frozen while the tokenizer uses "
        "them: train_also names no embedding and no head"
    )
    assert problems(grown, train_also=BOTH) == []
    assert "names no head" in problems(grown, train_also=BOTH[:1])[0]
    assert "names no embedding" in problems(grown, train_also=BOTH[1:])[0]
    assert problems(grown, train_also=("*",)) == []


@pytest.mark.parametrize(("rows", "size"), [(259, 320), (300, 320), (300, 260), (300, None)])
def test_rows_that_no_token_uses_may_be_random(tmp_path: Path, rows: int, size: int | None) -> None:
    assert problems(model(tmp_path, rows, vocab_size=size)) == []


def test_a_tied_table_is_trained_once(tmp_path: Path) -> None:
    grown = model(tmp_path, 257, tied=True, vocab_size=320)
    assert "names no embedding" in problems(grown)[0]
    assert problems(grown, train_also=BOTH[:1]) == []


def test_a_new_head(tmp_path: Path) -> None:
    new = model(tmp_path, 259, new_weights=("lm_head.*",))
    assert problems(new) == [
        "lm_head.*, which the model slot's new_weights draw at random, stay frozen"
    ]
    for also in ("lm_head.*", "lm_*"):
        assert problems(new, train_also=(also,)) == []
