"""The answers before and after a training, as its last lines have them."""

from __future__ import annotations

from typing import Any

from pipeline.view.ending import before_and_after


def shown(*steps: tuple[int, list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return the lines of a run that has generated these prompts and texts at these steps."""
    records: list[dict[str, Any]] = [{"step": 1, "time": 1.0, "loss": 2.0}]
    for step, texts in steps:
        samples = [{"number": n, "prompt": p, "text": t} for n, (p, t) in enumerate(texts)]
        records.append({"step": step, "time": 1.0, "generated": samples})
    return list(before_and_after(records))


def test_each_prompt_has_its_first_and_last_answer() -> None:
    found = shown(
        (0, [("Who?\nWhat?", "I\n am"), ("Where?", "")]),
        (5, [("Who?\nWhat?", "no"), ("Where?", "no")]),
        (9, [("Who?\nWhat?", "x" * 300), ("Where?", "There.")]),
    )
    assert found == [
        ("prompt", "Who? What?"), ("  before", "I am"), ("  after", f"{'x' * 200} ..."),
        ("prompt", "Where?"), ("  before", "(empty answer)"), ("  after", "There."),
    ]  # fmt: skip


def test_without_an_answer_before_training_there_is_none() -> None:
    assert shown((5, [("Who?", "no")]), (9, [("Who?", "yes")])) == []
    assert shown((0, [("Who?", "no")])) == []
    assert shown() == []


def test_at_most_three_prompts() -> None:
    many = [(f"{n}?", "a") for n in range(5)]
    assert len(shown((0, many), (3, many))) == 9


def test_a_prompt_that_was_changed_has_no_answer_before() -> None:
    found = shown((0, [("Who?", "a"), ("When?", "b")]), (9, [("Whose?", "c"), ("When?", "d")]))
    assert found == [("prompt", "When?"), ("  before", "b"), ("  after", "d")]


def test_the_later_answer_of_a_step_counts() -> None:
    found = shown((0, [("Who?", "a")]), (0, [("Who?", "b")]), (4, [("Who?", "c")]))
    assert found[1:] == [("  before", "b"), ("  after", "c")]
