"""The text of a table, and the outcome that each form of a rule has for a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.importing import rules
from stages.importing.rules import FOREIGN, NAMES, Rule, RuleResult, WrongValueError, outcome


def said(text: str, value: Any, **names: Any) -> RuleResult:
    """Return what the rule says of a value."""
    return Rule(text, {**NAMES, **names})(value)


def test_a_file_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
== test-one
lr eps
  decay: optimizer.* number | seed: seed whole
[fp16 bf16]
enabled: precision.compute = fp16
inner.size:
  ignored follows enabled

== test-two
# a remark
+ test-one my_ -seed
*: @idle

== test-values =
lr: 5e-5 -- theirs
"""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/test.txt").write_text(text)
    monkeypatch.setattr(rules, "__file__", str(tmp_path / "rules.py"))
    monkeypatch.setattr(rules, "TABLES", {"words": rules.TABLES["words"]})
    tables = rules.load("test")
    one, two = tables["test-one"], tables["test-two"]
    assert one.keys() == {"lr", "eps", "decay", "seed", "fp16", "bf16"}
    assert one["decay"]("0.1").fact == "optimizer.decay"
    assert one["bf16"]["enabled"](True).content == "fp16"
    assert one["fp16"]["inner"]["size"](3).why == "follows enabled"
    assert two.keys() == {"my_lr", "my_eps", "my_decay", "my_fp16", "my_bf16", "*"}
    assert two["*"](1).why == "has no effect with the other settings"
    assert tables["test-values"] == {"lr": "5e-5 -- theirs"}


@pytest.mark.parametrize(
    ("text", "value", "content"),
    [
        ("a", 3, "3"), ("a number", "1e-3", 1e-3), ("a betas auto=[0.9,0.99]", "auto", [0.9, 0.99]),
        ("a one, two=2, three=null", "TWO", 2), ("a one, two=2", "one", "one"),
        ("a cpu=cpu", "CPU", "cpu"), ("a = {}", True, {}), ("a = 1", "yes", 1),
        ("a = bf16 on=auto,full", "full", "bf16"), ("a twice", 4, 8),
        ("if off.* then a = 1 on=offload else a = 2", "offload", 1),
        ("if off.* then a = 1 on=offload else a = 2", True, 2),
    ],
)  # fmt: skip
def test_a_value_gives_a_fact(text: str, value: Any, content: Any) -> None:
    found = said(text, value, twice=lambda value: 2 * value)
    assert (found.outcome, found.fact, found.content) == ("translated", "a", content)
    assert found.auto == (value == "auto")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a", None), ("a off=,[],-1", ""), ("a off=,[],-1", []), ("a off=,[],-1", -1),
        ("a = 1", False), ("a = 1", "no"), ("refused is bad", {}), ("untranslated is new", "none"),
    ],
)  # fmt: skip
def test_a_value_that_is_off_gives_nothing(text: str, value: Any) -> None:
    found = said(text, value)
    assert (found.outcome, found.why, found.fact) == ("default", "is not set, or off", "")


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("ignored is old", 3, ("default", "is old", "", False)),
        ("untranslated is new", 3, ("not translated", "is new", "", False)),
        ("refused is bad -- leave it", 3, ("refused", "is bad", "leave it", False)),
        ("refused is bad !!", 3, ("refused", "is bad", "", True)),
        ("never {0!r} is bad !! go", None, ("refused", "None is bad", "go", True)),
        ("always 1, 2", 2, ("default", "every recipe does this", "", False)),
        ("always 1, 2 -- set 1", 3, ("refused", "is always 1 in a recipe", "set 1", False)),
        ("always true", 1, ("refused", "is always True in a recipe", "", False)),
        ("a x, y !! use x", "a -- b",
         ("refused", "'a -- b' is none of the values that a recipe has: x, y", "use x", True)),
        ("a number", True, ("refused", "must be a finite number, not True", "", False)),
        ("if p then ignored one else if q then never two -- go else never three", "q",
         ("refused", "two", "go", False)),
    ],
)  # fmt: skip
def test_a_value_has_an_outcome_with_its_reason(
    text: str, value: Any, expected: tuple[str, str, str, bool]
) -> None:
    found = said(text, value)
    assert (found.outcome, found.why, found.hint, found.blocks) == expected


def test_a_foreign_optimizer_is_a_fact_too() -> None:
    found = said("foreign optim adamw=a", "lion")
    assert (found.outcome, found.fact, found.content) == ("refused", FOREIGN, "lion")
    assert "choose another optimizer stage" in found.hint
    assert said("foreign refused is none", True).content == "another optimizer"


def test_a_hint_may_name_a_file_with_a_mark() -> None:
    found = outcome("refused names another file !! give it too: a -- b.json")
    assert (found.why, found.hint) == ("names another file", "give it too: a -- b.json")
    assert found.blocks


def test_a_row_with_an_unknown_reader_or_rule_is_a_mistake() -> None:
    for text in ("a nmber", "@missing"):
        with pytest.raises(KeyError):
            Rule(text)(1)


def test_a_wrong_value_is_refused_with_its_hint() -> None:
    def read(value: Any) -> Any:
        raise WrongValueError("refused is wrong !! set another")

    found = said("a read", 1, read=read)
    assert (found.outcome, found.why, found.hint) == ("refused", "is wrong", "set another")
    assert found.blocks
