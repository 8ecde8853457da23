"""Rows of texts: a prompt with its completion, Alpaca's instructions, plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.contracts.data import NO_TARGET
from stages.data.messages import Completion, Conversation, Tokens, checked, conversation
from stages.data.rows import Row, kind, require_text
from stages.data.sharegpt import system

_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


def prompt_completion(
    row: Row, roles: Sequence[str], *, template: bool
) -> Conversation | Completion:
    """A row with `prompt` and `completion`: both lists of messages, or both texts, which become a
    user's and an assistant's turn if `template`. Raises DataError."""
    prompt, completion = row.value["prompt"], row.value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = checked(row, prompt, "prompt", roles)
        behind = checked(row, completion, "completion", roles)
        return conversation(row, [*before, *behind], first=len(before))
    require_text(row, prompt, "`prompt`")
    require_text(row, completion, "`completion`")
    if not template:
        return Completion(row=row, prompt=prompt, completion=completion)
    return conversation(row, [_said("user", prompt), _said("assistant", completion)], first=1)


def alpaca(row: Row, *, template: bool) -> Conversation | Completion:
    """A row with `instruction`, `output` and perhaps `input`, `system` and `history`. Without a
    template the prompt is that of Stanford Alpaca (Taori et al. 2023). Raises DataError."""
    instruction = require_text(row, row.value["instruction"], "`instruction`")
    context = require_text(row, row.value.get("input") or "", "`input`")
    output = require_text(row, row.value["output"], "`output`")
    before = [*system(row), *_history(row)]
    if template:
        asked = f"{instruction}\n\n{context}" if context else instruction
        turns = [*before, _said("user", asked), _said("assistant", output)]
        return conversation(row, turns, first=len(turns) - 1)
    if before:
        raise row.error("`system` and `history` need a chat template", hint="set `template: true`")
    prompt = _WITH_INPUT if context else _WITHOUT_INPUT
    # one pass, so that braces in the texts stay
    filled = prompt.format(instruction=instruction, input=context)
    return Completion(row=row, prompt=filled, completion=output)


def text(row: Row) -> Completion:
    """A row with `text`, a document of its own. Raises DataError."""
    document = require_text(row, row.value["text"], "`text`")
    return Completion(row=row, prompt="", completion=document)


def _history(row: Row) -> Iterator[dict[str, Any]]:
    """Earlier turns: pairs of what the user and the assistant said."""
    history = row.value.get("history") or []
    if not isinstance(history, list):
        raise row.error(f"`history` is {kind(history)}, not a list of pairs of texts")
    for index, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise row.error(f"`history[{index}]` is no pair of texts")
        for role, said in zip(("user", "assistant"), pair, strict=True):
            yield _said(role, require_text(row, said, f"`history[{index}]`"))


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


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
