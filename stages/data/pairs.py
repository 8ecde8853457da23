"""Rows of texts: a prompt with its completion, Alpaca's instructions, plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stages.data.items import Completion, Conversation
from stages.data.messages import checked, conversation
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
