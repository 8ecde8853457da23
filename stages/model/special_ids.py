"""Ids of begin, end and padding in an exported model: those of its tokenizer, as transformers'
Trainer aligns them, and the tokens that end a turn under its chat template."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.data.rendering import layouts
from stages.data.template_limits import Limited, TemplateLimitError

_ANSWER = "answer"
_TURNS = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the special tokens with which an assistant's turn ends under the chat template: its
    own end, the same before a user's message if it has the same there; or else those with which a
    user's and a tool's message begin. Empty if there is no template, or no such token."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    render = Limited(tokenizer.apply_chat_template, tokenizer.name_or_path)
    try:
        last, user, tool = (_after_answer(render, *more) for more in ((), ("user",), ("tool",)))
    except TemplateLimitError:
        return []
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    end = ids(last)
    own = [id_ for id_ in end if id_ in special]
    if own:
        pairs = zip(end, ids(user), strict=False)
        both = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        same = [id_ for id_, _ in both if id_ in special]
        return [*same[-1:], *own][:1]
    begins = [id_ for text in (user, tool) for id_ in ids(text.removeprefix(last))[:1]]
    return [id_ for id_ in begins if id_ in special and id_ != tokenizer.bos_token_id]


def _after_answer(render: Limited, *roles: str) -> str:
    """Return the text after an answer that is followed by messages of some roles; empty if the
    template lays it out in no form. Raises TemplateLimitError."""
    for turns in layouts([*_TURNS, *({"role": role, "content": "."} for role in roles)]):
        try:
            text = str(render(list(turns), tokenize=False))
        except TemplateLimitError:
            raise
        except Exception:  # a template is a program, and may refuse this chat
            continue
        _, found, after = text.rpartition(_ANSWER)
        if found:
            return after
    return ""


def wanted_ids(tokenizer: Any, rows: int) -> Mapping[str, list[int]]:
    """Key of the configs -> ids that it must have, the tokenizer's own first; ids that are no rows
    of the embedding are left out."""
    found = {
        "eos_token_id": [tokenizer.eos_token_id, *turn_ends(tokenizer)],
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
            yield f"{name} is left as it is, and not aligned: it is not an object"
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
