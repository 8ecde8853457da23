"""Chat templates that a recipe names, and what a tokenizer and its template say of an exported
model: the ids of begin, end and padding, as transformers' Trainer aligns them, and the tokens that
end a turn."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline import StageError
from pipeline.utils import did_you_mean
from stages.model.files import is_local, local

MARKERS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Beginning and end of what a template marks as the assistant's."""
_FOLDER = Path(__file__).parent / "templates"
_TOKEN = re.compile(r"<[|｜][^\s<>{}]+?[|｜]>|<(?:start|end)_of_turn>")
_LARGEST = 1 << 20
"""Bytes."""
_ANSWER = "answer"
_TURNS = (("user", "question"), ("assistant", _ANSWER))


def known_templates() -> list[str]:
    """Return the names of the templates that come with this package."""
    return sorted(file.stem for file in _FOLDER.glob("*.jinja"))


def read_template(given: str) -> str:
    """Return the template of a local file or a known name. Raises StageError if there is none."""
    if not is_local(given):
        if given not in known_templates():
            hint = f"{did_you_mean(given, known_templates())}; a file starts with ./, ../, / or ~"
            raise StageError(f"no chat template is called {given!r}", hint=hint)
        return (_FOLDER / f"{given}.jinja").read_text("utf-8")
    from jinja2 import Environment, TemplateSyntaxError

    file = local(given)
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            raise StageError(f"{file} is not a file of at most {_LARGEST >> 20} MiB")
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise StageError(f"{file} cannot be read: {error}") from error
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(MARKERS.sub("", text))
    except TemplateSyntaxError as error:
        raise StageError(f"{file}:{error.lineno}: no chat template: {error.message}") from error
    except RecursionError as error:
        raise StageError(f"{file}: no chat template: nested too deep") from error
    return text


def unknown_tokens(template: str, tokenizer: Any) -> list[str]:
    """Return what looks like special tokens in a template, and is none of the tokenizer's."""
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    return sorted(set(_TOKEN.findall(template)) - known)


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the special tokens with which an assistant's turn ends under the chat template: its
    own end, the same before a user's message if it has the same there; or else those with which a
    user's and a tool's message begin. Empty if there is no template, or no such token."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    from stages.template_limits import Limited, TemplateLimitError

    render = Limited(tokenizer.apply_chat_template, tokenizer.name_or_path)

    def after_answer(*roles: str) -> str:
        """The text after an answer that messages of some roles follow; empty if it is not found."""
        turns = (*_TURNS, *((role, ".") for role in roles))
        for in_parts in (False, True):
            contents = ([{"type": "text", "text": text}] if in_parts else text for _, text in turns)
            pairs = zip(turns, contents, strict=True)
            chat = [{"role": role, "content": content} for (role, _), content in pairs]
            try:
                text = str(render(chat, tokenize=False))
            except TemplateLimitError:
                raise
            except Exception:  # a template is a program, and may refuse this chat
                continue
            _, found, after = text.rpartition(_ANSWER)
            if found:
                return after
        return ""

    try:
        last, user, tool = after_answer(), after_answer("user"), after_answer("tool")
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


def wanted_ids(tokenizer: Any, rows: int) -> Mapping[str, list[int]]:
    """Return key of the configs -> ids that it must have, the tokenizer's own first."""
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
    """Return the value of a config that has all `wanted` ids, if it may have `several`, or else the
    first; ids that it held end a text too, so they stay."""
    before = held if isinstance(held, list) else [held]
    if not wanted or set(wanted if several else wanted[:1]) <= set(before):
        return held
    if not several:
        return wanted[0]
    ids = [*wanted, *(id_ for id_ in before if id_ is not None and id_ not in wanted)]
    return ids if len(ids) > 1 else ids[0]


def align(folder: Path, tokenizer: Any, rows: int) -> Iterator[str]:
    """Align both configs of a saved model with its tokenizer; yield what was changed, in words."""
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
        # A model of text and more has the ids of its text in a part.
        text = content.get("text_config")
        part, changes = text if isinstance(text, dict) else content, []
        for key, ids in wanted.items():
            held = part.get(key)
            ends = key == "eos_token_id"
            several = ends and (name == "generation_config.json" or isinstance(held, list))
            value = aligned(held, ids, several=several)
            if value != held:
                part[key] = value
                changes.append(f"{key} {held} became {value}")
        if changes:
            content.pop("_from_model_config", None)  # it says more now than the model's config
            written = json.dumps(content, indent=2, ensure_ascii=False)
            (folder / name).write_text(f"{written}\n", encoding="utf-8")
            yield f"{name}: {', '.join(changes)}"
