"""The last lines about a run that has ended: what came out, what it has written by its
prompts, and what to do next."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.execution.talk import can_talk
from pipeline.utils.terminal import shown
from pipeline.utils.text import count, number, shown_path
from pipeline.view.run import History

REPORT = "report.html"
"""File of the report in a run's folder."""
MOST_PROMPTS = 3
MOST_LETTERS = 200
"""Prompts, and letters of a text, in the last lines of a run."""
MOST_IN_REPORT = 40
MOST_ANSWERS = 20
"""Prompts in a report, and answers to a prompt there: the first, and the newest."""


def outcome(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of what each training of a run measured: steps and mean speed, the
    reason of an early end, the first and the last held-out loss, plugins' numbers, and answers
    before and after training. Raises what `History` raises, and OSError."""
    for training in History(folder, ended=True).trainings:
        if step := training.step:
            rate, total = training.speed.mean("tokens_per_second"), step.get("total_steps")
            mean = "" if rate is None else f", {count(rate)} tokens/s (mean)"
            of_all = f" of {total}" if total and total > step["step"] else ""
            yield training.named("steps"), f"{step['step']}{of_all}{mean}"
        if training.ended_early:
            yield training.named("ended early"), shown(training.ended_early)
        if found := training.evaluations:  # 3.4 (step 0) -> 2.9 (step 60), best 2.8 (step 40)
            ends = [found[0], *(one for one in found[-1:] if one["step"] != found[0]["step"])]
            losses = (f"{number(one['eval_loss'])} (step {one['step']})" for one in ends)
            text, best = " -> ".join(losses), training.best
            if best is not None and best["step"] not in (one["step"] for one in ends):
                text += f", best {number(best['eval_loss'])} (step {best['step']})"
            yield training.named("held-out loss"), text
        for name, values in training.measured.items():
            at, value = values[-1]
            yield training.named(name), f"{value:.4g} at step {at}"
        for label, text in before_and_after(training.records):
            yield training.named(label), text


def next_lines(folder: Path, state: str) -> list[tuple[str, str]]:
    """Return labels with the files to look at and the commands to call after a run has ended; none
    while it is running."""
    if state == "running":
        return []
    run, report = shown_path(folder), folder / REPORT
    lines = [("report", shown_path(report))] if report.is_file() else []
    if state != "finished":
        lines.append(("continue", f"pipe resume {shlex.quote(run)}"))
    if can_talk(folder):
        lines.append(("talk to it", f"pipe chat {shlex.quote(run)}"))
    return lines


def by_prompt(found: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], dict[int, str]]:
    """Return number and text of each prompt of a run's records -> step -> answer. Of two answers of
    the same step, the later counts."""
    answers: dict[tuple[int, str], dict[int, str]] = {}
    for record in found:
        for one in record.get("generated", ()):
            by_step = answers.setdefault((one["number"], one["prompt"]), {})
            by_step[record["step"]] = one["text"]
    return answers


def before_and_after(found: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: each of the first prompts, and its answers before training and by the
    last step, from a run's metrics. Nothing without texts before the first step."""
    answers = by_prompt(found)
    last = max(itertools.chain(*answers.values()), default=0)
    both = (item for item in answers.items() if last and {0, last} <= item[1].keys())
    for (_, prompt), by_step in itertools.islice(both, MOST_PROMPTS):
        for label, text in (
            ("prompt", prompt),
            ("  before", by_step[0]),
            ("  after", by_step[last]),
        ):
            line = " ".join(text.split()) or "(empty answer)"
            cut = f"{line[:MOST_LETTERS].rstrip()} ..." if len(line) > MOST_LETTERS else line
            yield label, cut


def prompts(records: Iterable[Mapping[str, Any]], slot: str = "") -> list[dict[str, Any]]:
    """Return the newest prompts of a training's records for a report: `text`, the first and the
    last answer (`shown`), others (`between`), and how many were `left_out`. An answer has `when` it
    was written and its `text`, empty where it is white space; `slot` is the training's, if the run
    has others."""
    found = []
    for (_, text), by_step in list(by_prompt(records).items())[-MOST_IN_REPORT:]:
        first, *rest = (
            {
                "when": f"{slot} step {step}".strip() if step else f"before {slot or 'training'}",
                "text": shown(answer) if answer.strip() else "",
            }
            for step, answer in sorted(by_step.items())
        )
        kept = rest[max(0, len(rest) - MOST_ANSWERS + 1) :]
        ends, left_out = [first, *kept[-1:]], len(rest) - len(kept)
        found.append(
            {"text": shown(text), "shown": ends, "between": kept[:-1], "left_out": left_out}
        )
    return found
