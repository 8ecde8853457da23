"""What keys of every tool become: a row of `cases/` has keys, the fields of the recipe that differ
from that of `base`, and the reasons of keys that are not in it. `none` stands for no recipe; a
reason may go on in the outcome."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stages.importing.support import differences, made, reasons

CASES = {path.stem: yaml.safe_load(path.read_text("utf-8"))
         for path in sorted(Path(__file__).with_name("cases").glob("*.yaml"))}  # fmt: skip


def rows() -> Iterator[Any]:
    for tool, content in CASES.items():
        for number, (said, *expected) in enumerate(content["cases"]):
            yield pytest.param(tool, said, *expected, *[{}] * (2 - len(expected)),
                               id=f"{tool} {number} {str(said)[:50]}")  # fmt: skip


@pytest.mark.parametrize(("tool", "said", "recipe", "why"), [*rows()])
def test_keys(
    tool: str, said: dict[str, Any], recipe: dict[str, Any] | str, why: dict[str, str]
) -> None:
    content = CASES[tool]
    besides = (content["base"], content.get("procs"), content.get("files", ()))
    found = made(tool, said, *besides)
    base = None if isinstance(said.get("="), str) else made(tool, {}, *besides)
    assert differences(found, base) == (
        pytest.approx(recipe) if recipe == {"optimizer.final_lr_ratio": 0.1} else recipe
    )
    told = reasons(found, base)
    assert told.keys() == why.keys()
    for key, text in why.items():
        assert told[key].startswith(text), key
