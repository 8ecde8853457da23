"""Forms of rows: each is recognised by its keys and read as an example."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from pipeline import NO_TARGET, DataError, StageError
from stages.data import messages
from stages.data.messages import Conversation, Names, conversation
from stages.data.mistakes import Enough, Mistakes
from stages.data.rows import JSON_LINES, Row, kind, require, require_text, rows
from stages.data.sources import Part

KEYS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "input_ids": ("input_ids",),
}
"""Keys that a row of each form has."""
PAIRS = (
    ("question", "answer"), ("query", "response"), ("input", "output"), ("prompt", "response"),
    ("instruction", "response"), ("question", "response"), ("prompt", "answer"),
)  # fmt: skip
"""Names of columns for what `prompt` and `completion` are here."""
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(role|content|from|value)"\s*:')


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A prompt and the text that follows it, used without a chat template. With an empty prompt the
    text is a document by itself."""

    row: Row
    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids and, for each, whether it is trained on."""

    ids: Sequence[int]
    trained: Sequence[bool]


Example = Conversation | Completion | Tokens


def rows_with_forms(
    parts: Iterable[Part], given: str | None, names: Names, mistakes: Mistakes
) -> Iterator[Row]:
    """Yield every row with its form: the `given` one, or else the one that its keys fit. `mistakes`
    gets a DataError for each row that cannot be read, fits no form or several, lacks the keys of
    the given one, or is of another form than the first of its file; and for a file that cannot be
    read to its end, or has no row."""
    for part in parts:
        first, before = "", mistakes.count
        try:
            for row in part.rows(report=mistakes.report):
                if mistakes.enough:
                    return
                try:
                    form = _form(row, given, names)
                    first = first or form
                    if form != first:
                        raise row.error(
                            f"a row of form {form!r} in a file of {first!r} rows",
                            hint="keep each form in separate files, and name them in `sources`",
                        )
                except DataError as error:
                    mistakes.report(error)
                    continue
                yield dataclasses.replace(row, form=form)
            if not first and mistakes.count == before:
                raise DataError("no row in this file", file=part.name, row=1)
        except Enough:
            return
        except DataError as error:
            mistakes.add_file(error)


def first_form(path: Path, names: Names) -> str | None:
    """Return the form of the first row of a file of JSON lines, if it is found."""
    if not path.name.endswith(JSON_LINES):
        return None
    try:
        first = next(rows(path), None)
        return _form(first, None, names) if first else None
    except (StageError, OSError):
        return None  # the run reports it


def _form(row: Row, given: str | None, names: Names) -> str:
    keys = {key for key, value in names.renamed(row.value).items() if value is not None}
    fits = [form for form, needed in KEYS.items() if keys.issuperset(needed)]
    if given in fits or (given is None and len(fits) == 1):
        return given or fits[0]
    if fits and given is None:
        raise row.error(f"could be of form {' or '.join(map(repr, fits))}", hint="set `form`")
    wanted = [
        " and ".join(f"`{names.columns.get(key, key)}`" for key in KEYS[form])
        for form in (KEYS if given is None else [given])
    ]
    hint = f"a row has one of: {'; '.join(dict.fromkeys(wanted))}"
    if not names.columns:
        hint += "; `columns` says what they are called here"
    there = sorted(key for key, value in row.value.items() if value is not None)
    lacks = f"no {wanted[0]}" if given is not None else "fits no form"
    has = ", ".join(f"`{key}`" for key in there) or "nothing"
    # Its keys may resemble those of a form.
    pairs = (pair for pair in PAIRS if not names.columns and {*pair} <= {*there})
    if {"chosen", "rejected"} <= {*there}:
        hint = "rows of preferences are trained on by TRL's DPOTrainer, not by this program"
    elif pair := next(pairs, None):
        columns = zip(("prompt", "completion"), pair, strict=True)
        written = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns if ours != theirs)
        hint = f"write `columns: {{{written}}}` in the data slot"
    else:
        known = {names.columns.get(key, key) for needed in KEYS.values() for key in needed}
        close = (get_close_matches(k, known, n=1, cutoff=0.8) for k in there if k not in known)
        hint = next((f"did you mean `{found[0]}`?" for found in close if found), hint)
    raise row.error(f"{lacks}; it has {has}", hint=hint)


def read(row: Row, *, template: bool, names: Names, vocab_size: int) -> Example:
    """Read a row, whose form is known, as an example. Raises DataError for a mistake in the row.
    `template`: whether a pair of texts becomes a user's and an assistant's turn of the chat
    template. `vocab_size`: bound of token ids."""
    row = names.row(row)
    match row.form:
        case "messages":
            turns = messages.checked(row, row.value["messages"], "messages", names)
            return conversation(row, turns)
        case "sharegpt":
            return messages.read_sharegpt(row, names)
        case "prompt/completion":
            return _prompt_completion(row, names, template=template)
        case "alpaca":
            return _alpaca(row, template=template)
        case "text":
            text = require_text(row, row.value["text"], "`text`")
            return Completion(row=row, prompt="", completion=text)
        case _:
            return _tokens(row, vocab_size)


def _prompt_completion(row: Row, names: Names, *, template: bool) -> Conversation | Completion:
    """Read a row whose `prompt` and `completion` are both lists of messages, or both texts."""
    for key in ("prompt", "completion"):
        if isinstance(row.value[key], str) and _MESSAGES.match(row.value[key]):
            raise row.error(
                f"`{key}` is text that looks like a list of messages as JSON",
                hint="write it as a list; or the whole conversation under `messages`, where JSON "
                "text is read",
            )
    prompt, completion = (
        messages.listed(row, given, key) if isinstance(given := row.value[key], dict) else given
        for key in ("prompt", "completion")
    )
    if isinstance(prompt, list) and isinstance(completion, list):
        before = messages.checked(row, prompt, "prompt", names)
        after = messages.checked(row, completion, "completion", names)
        return conversation(row, [*before, *after], first=len(before))
    require_text(row, prompt, "`prompt`")
    require_text(row, completion, "`completion`")
    if not template:
        return Completion(row=row, prompt=prompt, completion=completion)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return conversation(row, turns, first=1)


def _alpaca(row: Row, *, template: bool) -> Conversation | Completion:
    """Read a row with `instruction`, `output` and optionally `input`, `system` and `history`.
    Without a template it takes the prompt of Stanford Alpaca (Taori et al. 2023)."""
    instruction = require_text(row, row.value["instruction"], "`instruction`")
    context = require_text(row, row.value.get("input") or "", "`input`")
    output = require_text(row, row.value["output"], "`output`")
    before = messages.system_message(row)
    history = row.value.get("history") or []
    require(row, history, list, "`history`", "a list of pairs of texts")
    for index, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise row.error(f"`history[{index}]` is not a pair of texts")
        before += [
            {"role": role, "content": require_text(row, text, f"`history[{index}]`")}
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    if template:
        question = f"{instruction}\n{context}" if context else instruction
        before += [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        return conversation(row, before, first=len(before) - 1)
    if before:
        raise row.error("`system` and `history` need a chat template", hint="set `template: true`")
    prompt = _WITH_INPUT if context else _WITHOUT_INPUT
    prompt = prompt.format(instruction=instruction, input=context)
    return Completion(row=row, prompt=prompt, completion=output)


def _tokens(row: Row, vocab_size: int) -> Tokens:
    """Read a row with `input_ids`, and `labels` in the Hugging Face convention (the id of the same
    position, or -100) or a `loss_mask` of 0 and 1. Without either, every token is trained on."""
    ids = _integers(row, "input_ids")
    if not ids:
        raise row.error("`input_ids` is empty")
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            limit = f"but the model embeds {vocab_size} tokens"
            raise row.error(f"`input_ids[{index}]` is {token}, {limit}")
    if row.value.get("attention_mask") is not None and 0 in _integers(row, "attention_mask"):
        raise row.error("`attention_mask` hides tokens", hint="give the row without its padding")
    given = [key for key in ("labels", "loss_mask") if row.value.get(key) is not None]
    if not given:
        return Tokens(ids=ids, trained=[True] * len(ids))
    if len(given) == 2:
        raise row.error("has both `labels` and `loss_mask`", hint="leave out one of them")
    values = _integers(row, given[0])
    if len(values) != len(ids):
        raise row.error(f"`{given[0]}` has {len(values)} entries, `input_ids` has {len(ids)}")
    for index, (value, token) in enumerate(zip(values, ids, strict=True)):
        if given[0] == "loss_mask" and value not in (0, 1):
            raise row.error(f"`loss_mask[{index}]` is {value}, neither 0 nor 1")
        if given[0] == "labels" and value not in (NO_TARGET, token):
            raise row.error(
                f"`labels[{index}]` is {value}, but `input_ids[{index}]` is {token}",
                hint=f"a label is the id at the same position, not of the next, or {NO_TARGET}",
            )
    off = NO_TARGET if given[0] == "labels" else 0
    return Tokens(ids=ids, trained=[value != off for value in values])


def _integers(row: Row, key: str) -> list[int]:
    values: list[int] = require(row, row.value[key], list, f"`{key}`", "a list of integers")
    for index, value in enumerate(values):
        if not isinstance(value, int) or (isinstance(value, bool) and key != "loss_mask"):
            raise row.error(f"`{key}[{index}]` is {kind(value)}, not an integer")
    return values
