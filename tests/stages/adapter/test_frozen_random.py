"""Random weights that an adapter would leave frozen while data train on them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.testing import plan_view
from pipeline.testing.helpers import checked
from stages.adapter.lora import Lora
from stages.model.hf import HfModel
from tests.stages.data.fakes import FakeSource

BOTH = ("*embed_tokens.weight", "lm_head.weight")


def problems(model: HfModel, **fields: object) -> list[str]:
    """Return the mistakes of an adapter's `train_also`."""
    stage = dataclasses.replace(Lora(), **fields)  # type: ignore[arg-type]
    view = plan_view({"model": model, "adapter": stage})
    return [p.message for p in stage.check(view) if p.key == "train_also"]


def model(
    folder: Path, rows: int, *, kind: str = "llama", tied: bool | None = False, **fields: object
) -> HfModel:
    """Return a slot of a model with `rows` rows, whose tokenizer has ids up to 258."""
    config = {"model_type": kind, "vocab_size": rows, "tie_word_embeddings": tied}
    config = {key: value for key, value in config.items() if value is not None}
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


@pytest.mark.parametrize(
    ("kind", "tied", "also", "lacking"),
    [
        ("gpt_neox", None, ("embed_out.weight",), ["embedding", "head"]),  # of older releases
        ("gpt_neox", None, ("gpt_neox.embed_in.weight",), ["head"]),
        ("gpt_neox", None, ("*.embed_in.*", "lm_head.*"), []),
        ("gpt2", None, ("transformer.wte.weight",), []),
        ("gpt2", None, ("lm_head.weight",), ["embedding"]),
        ("gpt2", False, ("*wte*",), ["head"]),
        ("gemma", None, ("model.embed_tokens.weight",), []),
        ("gemma", None, ("embed_tokens",), ["embedding"]),  # which matches no whole name
        ("opt", None, ("model.decoder.embed_tokens.weight",), []),
        ("rwkv", False, ("rwkv.embeddings.*", "head.weight"), []),
        ("llama", False, ("model.layers.0.*", "*overhead*"), ["embedding", "head"]),
        ("xlstm", None, (), ["embedding", "head"]),  # whose source does not name them
        ("xlstm", None, ("backbone.embeddings.weight",), []),
    ],
)
def test_the_names_of_tables_are_those_of_the_type(
    tmp_path: Path, kind: str, tied: bool | None, also: tuple[str, ...], lacking: list[str]
) -> None:
    grown = model(tmp_path, 257, kind=kind, tied=tied, vocab_size=320)
    told = [f"names no {' and no '.join(lacking)}"] if lacking else []
    found = problems(grown, train_also=also)
    assert [each.rpartition("train_also ")[2] for each in found] == told


def test_a_new_head(tmp_path: Path) -> None:
    new = model(tmp_path, 259, new_weights=("lm_head.*",))
    assert problems(new) == [
        "lm_head.*, which the model slot's new_weights draw at random, stay frozen"
    ]
    for also in ("lm_head.*", "lm_*"):
        assert problems(new, train_also=(also,)) == []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[: len(text) // 2], "tokenizer.json cannot be read: "),
        (lambda text: text.replace('"id": 258', '"it": 258'), "tokenizer.json is damaged: a token"),
        (lambda text: text.replace('"id": 258', '"id": null'), "tokenizer.json is damaged: a tok"),
        (lambda text: text.replace('"id": 258', '"id": "x"'), "tokenizer.json is damaged: a tok"),
        (lambda text: "[]", "tokenizer.json is not a JSON object"),
        (lambda text: '{"model": [1]}', "tokenizer.json is damaged: a token"),
    ],
)
def test_a_damaged_tokenizer_is_a_sentence(
    tmp_path: Path, damage: Callable[[str], str], told: str
) -> None:
    grown = model(tmp_path, 257, vocab_size=320)
    file = tmp_path / "tokenizer.json"
    before = file.read_text("utf-8")
    file.write_text(damage(before), "utf-8")
    assert file.read_text("utf-8") != before
    view = plan_view({"model": grown})
    (message,) = [p.message for p in checked(Lora(), view) if not p.warning]
    assert message.startswith(f"{tmp_path}/{told}")
