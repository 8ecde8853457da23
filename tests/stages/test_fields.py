"""Fields that say how often something happens."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from stages.fields import Period

PERIOD: TypeAdapter[Any] = TypeAdapter(Period)


@pytest.mark.parametrize(
    "value", [1, 200, "1 epoch", "2 epochs", "0.25 epochs", ".5 epochs", "1/3 epochs"]
)
def test_steps_and_parts_of_an_epoch(value: int | str) -> None:
    assert PERIOD.validate_python(value) == value


@pytest.mark.parametrize(
    "value", ["2 weeks", "0 epochs", "0.0 epochs", "1/0 epochs", "1 epoch\n", "-1 epochs", ""]
)
def test_other_texts_are_refused_in_words(value: str) -> None:
    with pytest.raises(ValidationError) as told:
        PERIOD.validate_python(value)
    said = [error["msg"] for error in told.value.errors() if error["type"] == "period"]
    assert said == [
        "must be a number of steps, or a part of an epoch as in `1 epoch`, `0.25 epochs` or "
        "`1/3 epochs`"
    ]


def test_editors_have_the_pattern() -> None:
    pattern = PERIOD.json_schema()["anyOf"][1]["pattern"]
    assert pattern.startswith("^(")
    assert pattern.endswith(" epochs?$")
