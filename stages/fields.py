"""Fields of stages: how often something happens in a training, and paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeAlias

from annotated_types import Gt
from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from pipeline import Data, PlanView, Problem, traits

_DECIMAL = r"(0?\.[0-9]{0,8}[1-9][0-9]{0,8}|[1-9][0-9]{0,8}(\.[0-9]{1,8})?)"
_RATIO = r"[1-9][0-9]{0,8}/[1-9][0-9]{0,8}"
_EPOCHS = f"^({_DECIMAL}|{_RATIO}) epochs?$"


def _in_words(value: str) -> str:
    """Refuse a text that is not part of an epoch, without a regular expression in the message."""
    if not re.fullmatch(_EPOCHS, value):
        raise PydanticCustomError(
            "period",
            "must be a number of steps, or a part of an epoch as in `1 epoch`, `0.25 epochs` or "
            "`1/3 epochs`",
        )
    return value


Period: TypeAlias = (
    Annotated[int, Gt(0)]
    | Annotated[
        str, AfterValidator(_in_words), WithJsonSchema({"type": "string", "pattern": _EPOCHS})
    ]
)
"""A number of steps, or a part of an epoch: `1 epoch`, `0.25 epochs`, `1/3 epochs`."""


def epoch_problems(
    trains: Iterable[Any], plan: PlanView, **periods: int | str | None
) -> Iterator[Problem]:
    """Yield the fields that count epochs of the data that stages train on, where those know of
    none."""
    given = [plan.producer(train, Data) for train in trains]
    if all(data.has_epochs for data in given if isinstance(data, traits.HasEpochs)):
        return
    for key, period in periods.items():
        if isinstance(period, str):
            message = f"is {period}, and the data slot does not know how many samples an epoch has"
            yield Problem(key=key, message=message, hint="give a number of steps")


def instead_of_variable(path: str) -> str:
    """Return a hint with what to write for a path with a variable, such as `$DATA/x.jsonl`; empty
    for other paths."""
    found = re.search(r"\$(\w+)", path)
    if found is None:
        return ""
    written = path.replace(found[0], f"${{oc.env:{found[1]}}}")
    return f"write {written}, and `env: [{found[1]}]` at the top of the recipe"
