"""The forms that rows come in, found by their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from pipeline.errors import StageError
from stages.data import completions, messages, sharegpt
from stages.data.files import JSON_LINES
from stages.data.messages import Item
from stages.data.rows import Row
from stages.data.sources import FilePart, Part
from stages.data.tokenize import Reading

FormName = Literal[
    "messages", "sharegpt", "prompt/completion", "alpaca", "text", "input_ids"
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How rows are understood."""

    template: bool
    """Whether a pair of texts becomes a user's and an assistant's turn of the chat template."""
    roles: tuple[str, ...] = ()
    """Roles of messages beside the usual ones."""
    vocab_size: int
    """Ids of pre-tokenised rows are below it."""

    def item(self, form: FormName, row: Row) -> Item:
        """A row of this form, checked. Raises DataError for what is wrong in it."""
        return FORMS[form].read(self, row)


class Form(NamedTuple):
    """A form, the keys that tell it, and what reads it."""

    keys: tuple[str, ...]
    read: Callable[[Reader, Row], Item]


FORMS: Mapping[FormName, Form] = {
    "messages": Form(("messages",), lambda reader, row: messages.item(row, reader.roles)),
    "sharegpt": Form(("conversations",), lambda reader, row: sharegpt.item(row, reader.roles)),
    "prompt/completion": Form(
        ("prompt", "completion"),
        lambda reader, row: completions.prompt_completion(
            row, reader.roles, template=reader.template
        ),
    ),
    "alpaca": Form(
        ("instruction", "output"),
        lambda reader, row: completions.alpaca(row, template=reader.template),
    ),
    "text": Form(("text",), lambda reader, row: completions.text(row)),
    "input_ids": Form(
        ("input_ids",), lambda reader, row: completions.item(row, reader.vocab_size)
    ),
}  # fmt: skip


def _keys(form: Form) -> str:
    return " and ".join(f"`{key}`" for key in form.keys)


_KNOWN = "; ".join(map(_keys, FORMS.values()))


@dataclass(kw_only=True)
class FormFinder:
    """Tells every row's form, and counts them."""

    form: FormName | None
    """The form of all rows; None finds it by each row's keys."""
    counts: Counter[str] = field(default_factory=Counter)

    def rows(self, parts: Iterable[Part], reading: Reading) -> Iterator[tuple[FormName, Row]]:
        """Every row with its form. Raises DataError for a row without a form or without the keys of
        the one that is given, one of another form than the first of its file, and a file without
        rows."""
        for part in parts:
            first: FormName | None = None
            for row in part.rows(reading):
                form = _required(row, self.form) if self.form else _form(row)
                first = first or form
                if form != first:
                    raise row.error(f"a row of form {form!r} in a file of {first!r} rows")
                self.counts[form] += 1
                yield form, row
            if first is None:
                raise Row(file=part.name, number=1, value=None).error("no row in this file")


def first_form(path: Path) -> FormName | None:
    """The form of the first row of a file of lines, if it can be told; other files are not read."""
    if not path.name.endswith(JSON_LINES):
        return None
    try:
        part = FilePart(path)
        rows = FormFinder(form=None).rows([part], Reading(total=part.size))
        return next((form for form, _ in rows), None)
    except (StageError, OSError):
        return None  # reading it tells


def _has(row: Row) -> set[str]:
    return {key for key, value in row.value.items() if value is not None}


def _required(row: Row, form: FormName) -> FormName:
    """The form that was given. Raises the row's error when it lacks a key of that form."""
    has = _has(row)
    if not has.issuperset(FORMS[form].keys):
        raise row.error(
            f"has {sorted(has)}, which is no row of form {form!r}",
            hint=f"such a row has {_keys(FORMS[form])}; without `form` the keys tell",
        )
    return form


def _form(row: Row) -> FormName:
    has = _has(row)
    fits = [name for name, form in FORMS.items() if has.issuperset(form.keys)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise row.error(f"could be of form {' or '.join(map(repr, fits))}", hint="set `form`")
    raise row.error(f"has {sorted(has)}", hint=f"a row has one of: {_KNOWN}")
