"""Rows that are token ids already."""

from __future__ import annotations

from typing import Any

from pipeline.artifacts import NO_TARGET
from stages.data.items import Tokens
from stages.data.rows import Row, kind


def item(row: Row, vocab_size: int) -> Tokens:
    """A row with `input_ids`, and `labels` in the Hugging Face convention (the id of the same
    position, or -100) or a `loss_mask` of 0 and 1. Without either, every token is trained on.
    Raises DataError."""
    ids = _integers(row, row.value["input_ids"], "input_ids")
    if len(ids) == 0:
        raise row.error("`input_ids` is empty")
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            limit = f"the model embeds {vocab_size} tokens"
            raise row.error(f"`input_ids[{index}]` is {token}, but {limit}")
    _refuse_padding(row)
    return Tokens(row=row, ids=ids, trained=_trained(row, ids))


def _trained(row: Row, ids: list[int]) -> list[bool]:
    given = [key for key in ("labels", "loss_mask") if row.value.get(key) is not None]
    if len(given) == 2:
        raise row.error("has both `labels` and `loss_mask`", hint="leave out one of them")
    if not given:
        return [True] * len(ids)
    key = given[0]
    values = _integers(row, row.value[key], key)
    if len(values) != len(ids):
        raise row.error(f"`{key}` has {len(values)} entries, `input_ids` has {len(ids)}")
    return _by_labels(row, values, ids) if key == "labels" else _by_mask(row, values)


def _by_labels(row: Row, labels: list[int], ids: list[int]) -> list[bool]:
    for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (NO_TARGET, token):
            raise row.error(
                f"`labels[{index}]` is {label}, but `input_ids[{index}]` is {token}",
                hint=f"a label is the id of its own position, not of the next, or {NO_TARGET}",
            )
    return [label != NO_TARGET for label in labels]


def _by_mask(row: Row, mask: list[int]) -> list[bool]:
    for index, value in enumerate(mask):
        if value not in (0, 1):
            raise row.error(f"`loss_mask[{index}]` is {value}, neither 0 nor 1")
    return [value == 1 for value in mask]


def _refuse_padding(row: Row) -> None:
    mask = row.value.get("attention_mask")
    if mask is not None and 0 in _integers(row, mask, "attention_mask"):
        raise row.error("`attention_mask` hides tokens", hint="give the row without its padding")


def _integers(row: Row, values: Any, key: str) -> list[int]:
    if not isinstance(values, list):
        raise row.error(f"`{key}` is {kind(values)}, not a list of integers")
    for index, value in enumerate(values):
        if not isinstance(value, int) or (isinstance(value, bool) and key != "loss_mask"):
            raise row.error(f"`{key}[{index}]` is {kind(value)}, not an integer")
    return values
