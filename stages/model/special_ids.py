"""Ids of begin, end and padding in an exported model: those of its tokenizer, as transformers'
Trainer aligns them, and the token that ends a turn under its chat template."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.data.template_limits import Limited

_ANSWER = "answer"


def turn_end(tokenizer: Any) -> int | None:
    """Return the special token with which the chat template ends the turn of an assistant; None if
    there is no template, or no such token."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    text = ""
    with contextlib.suppress(Exception):  # a template is a program, and may refuse this chat
        render = Limited(tokenizer.apply_chat_template, tokenizer.name_or_path)
        text = str(render(turns, tokenize=False))
    _, found, tail = text.rpartition(_ANSWER)
    if not found:
        return None
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return next((id_ for id_ in ids if id_ in special), None)


def wanted_ids(tokenizer: Any, rows: int) -> Mapping[str, list[int]]:
    """Key of the configs -> ids that it must have, the tokenizer's own first; ids that are no rows
    of the embedding are left out."""
    found = {
        "eos_token_id": [tokenizer.eos_token_id, turn_end(tokenizer)],
        "bos_token_id": [tokenizer.bos_token_id],
        "pad_token_id": [tokenizer.pad_token_id],
    }
    return {
        key: list(dict.fromkeys(id_ for id_ in ids if id_ is not None and id_ < rows))
        for key, ids in found.items()
    }


def aligned(held: Any, wanted: list[int], *, several: bool) -> Any:
    """The value of a config that has all `wanted` ids, if it may have `several`, or else the first;
    ids that it held end a text too, so they stay."""
    before = held if isinstance(held, list) else [held]
    if not wanted or set(wanted if several else wanted[:1]) <= set(before):
        return held
    if not several:
        return wanted[0]
    ids = [*wanted, *(id_ for id_ in before if id_ is not None and id_ not in wanted)]
    return ids if len(ids) > 1 else ids[0]


def align(folder: Path, tokenizer: Any, rows: int) -> Iterator[str]:
    """Align `config.json` and `generation_config.json` of a saved model with its tokenizer, and
    yield what was changed, in words."""
    wanted = wanted_ids(tokenizer, rows)
    for name in ("config.json", "generation_config.json"):
        try:
            content = json.loads((folder / name).read_text("utf-8"))
        except ValueError as error:  # the source's own, which is copied
            yield f"{name} is left as it is, and not aligned: {error}"
            continue
        if not isinstance(content, dict):
            yield f"{name} is left as it is, and not aligned: it is no object"
            continue
        # a model of text and more has the ids of its text in a part
        text = content.get("text_config")
        part, changes = text if isinstance(text, dict) else content, {}
        for key, ids in wanted.items():
            held = part.get(key)
            ends = key == "eos_token_id"
            several = ends and (name == "generation_config.json" or isinstance(held, list))
            value = aligned(held, ids, several=several)
            if value != held:
                part[key], changes[key] = value, (held, value)
        if changes:
            content.pop("_from_model_config", None)  # it says more now than the model's config
            written = json.dumps(content, indent=2, ensure_ascii=False)
            (folder / name).write_text(f"{written}\n", encoding="utf-8")
            found = (f"{key} {before} became {now}" for key, (before, now) in changes.items())
            yield f"{name}: {', '.join(found)}"
