"""The last lines about a run that has ended, and the answers to its prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.view.ending import before_and_after, next_lines, outcome, prompts
from tests.pipeline.view.folders import evaluation, made, said, step


def test_what_came_out(tmp_path: Path) -> None:
    records = [
        evaluation(0, 4.0, 0, 4.0),
        step(1, tokens_per_second=100.0),
        step(2, tokens_per_second=300.0, step_seconds=6.0),
        {"step": 2, "accuracy": 0.5},
        evaluation(2, 3.0, 2, 3.0),
    ]
    assert dict(outcome(made(tmp_path / "run", [], records))) == {
        "steps": "2 of 20, 250 tokens/s (mean)",
        "held-out loss": "4.0000 (step 0) -> 3.0000 (step 2)",
        "accuracy": "0.5 at step 2",
    }
    worse = evaluation(3, 3.5, 2, 3.0)
    found = dict(outcome(made(tmp_path / "worse", [], [*records, worse])))
    assert found["held-out loss"] == "4.0000 (step 0) -> 3.5000 (step 3), best 3.0000 (step 2)"
    once = dict(outcome(made(tmp_path / "once", [], records[:1])))
    assert once == {"held-out loss": "4.0000 (step 0)"}
    assert dict(outcome(made(tmp_path / "nothing"))) == {}


def test_a_training_that_ended_early(tmp_path: Path) -> None:
    end = {"step": 2, "time": 9.0, "ended_early": "enough"}
    found = dict(outcome(made(tmp_path / "run", [], [step(1), step(2), end])))
    assert found["ended early"] == "enough"
    assert found["steps"].startswith("2 of 20, ")
    on = dict(outcome(made(tmp_path / "on", [], [step(1), step(2), end, step(3)])))
    assert "ended early" not in on


def test_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    assert next_lines(folder, "finished") == []
    (folder / "report.html").touch()
    assert next_lines(folder, "running") == []
    monkeypatch.chdir(tmp_path)
    assert next_lines(folder, "finished") == [("report", "a run/report.html")]
    for state in ("failed", "stopped"):
        assert next_lines(folder, state)[1:] == [("continue", "pipe resume 'a run'")]


def shown(*steps: tuple[int, list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return the lines of a run that has generated these prompts and texts at these steps."""
    records = [step(1)]
    for number, texts in steps:
        samples = [{"number": n, "prompt": p, "text": t} for n, (p, t) in enumerate(texts)]
        records.append({"step": number, "time": 1.0, "generated": samples})
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
    many = [(f"{n}?", "a") for n in range(5)]
    assert len(shown((0, many), (3, many))) == 9  # of three prompts at most


def test_which_answers_are_before_and_after() -> None:
    assert shown((5, [("Who?", "no")]), (9, [("Who?", "yes")])) == []  # none before training
    assert shown((0, [("Who?", "no")])) == []
    assert shown() == []
    changed = shown((0, [("Who?", "a"), ("When?", "b")]), (9, [("Whose?", "c"), ("When?", "d")]))
    assert changed == [("prompt", "When?"), ("  before", "b"), ("  after", "d")]
    twice = shown((0, [("Who?", "a")]), (0, [("Who?", "b")]), (4, [("Who?", "c")]))
    assert twice[1:] == [("  before", "b"), ("  after", "c")]  # the later answer of a step


def test_prompts_and_answers_of_a_report() -> None:
    records = [said(0, " \n", "x"), said(2, "b"), said(4, "c"), said(4, "again"), said(6, "d")]
    first, second = prompts(records)
    assert (first["text"], second["text"]) == ("p0", "p1")
    assert first["shown"] == [
        {"when": "before training", "text": ""}, {"when": "step 6", "text": "d"}
    ]  # fmt: skip
    assert first["between"] == [
        {"when": "step 2", "text": "b"}, {"when": "step 4", "text": "again"}
    ]  # fmt: skip
    assert [one["text"] for one in second["shown"]] == ["x"]
    (many,) = prompts([said(at, str(at)) for at in range(100)])
    assert [one["text"] for one in many["shown"]] == ["0", "99"]
    assert (many["left_out"], len(many["between"])) == (80, 18)
