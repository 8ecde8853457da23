"""The report of a run: one file, nothing loaded, nothing of a run can break out of its text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.view.compare import comparison_page
from pipeline.view.run import History
from pipeline.view.run_report import memory, run_page, timeline, write_report
from tests.pipeline.view.folders import (
    EVENTS,
    METRICS,
    RECIPE,
    TRAINING,
    drawn,
    made,
    said,
    step,
)

MOST_BYTES = 300_000


class Tags(HTMLParser):
    """Collects what a page would load, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "poster") and value != "data:,":
                self.loaded.append(f"{tag} {name}={value}")


def test_a_report_says_what_happened(tmp_path: Path) -> None:
    page = write_report(made(tmp_path / "run", EVENTS, METRICS)).read_text("utf-8")
    for text in (
        "finished", "6 of 20", "3.4000", "3.9000 at step 1", "3.3000", "rank 1 was killed",
        "training paused for 0.25 s", "the loss is a spike: skip", "Once ", "upon",
        "stages.wrap.use", "wrap.ddp", "recipe.yaml:",
    ):  # fmt: skip
        assert text in page, text
    loss = drawn(page)[0]
    assert loss["data"][0] == [1, 2, 3, 4, 5, 6]
    assert loss["data"][1] == pytest.approx([3.9, 3.8, 3.7, 3.6, 3.5, 3.4])
    assert loss["data"][2] == [None, None, None, 3.3, None, None]


def test_a_report_has_the_command_as_it_is_typed(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", EVENTS, METRICS)
    for words, typed in (
        (["/usr/bin/pipe", "run", "a b.yaml"], "pipe run &#39;a b.yaml&#39;"),
        (["/somewhere/pipetrain.py", "run"], "pipe run"),
        (["train.py", "--lr=1"], "train.py --lr=1"),
    ):
        (folder / "environment.json").write_text(json.dumps({"command": words}))
        assert f"<code>{typed}</code>" in run_page(History(folder))


def test_a_report_says_what_saves_cost(tmp_path: Path) -> None:
    written: dict[str, Any] = {"step": 2, "time": 1002.0, "checkpoint_seconds": 1.0}
    spent = {"checkpoint_user_seconds": 0.5, "checkpoint_system_seconds": 0.25}
    known = {**written, **spent, "step": 4, "checkpoint_slowed_seconds": 0.125}
    folder = made(tmp_path / "run", EVENTS, [*METRICS, written, known])
    told = [mark.text for mark in timeline(History(folder)) if mark.kind == "save"]
    assert told == [
        "on disk after 1.00 s",
        "on disk after 1.00 s, training paused for 0.25 s, steps took 0.12 s longer meanwhile, "
        "0.75 s of processor time",
    ]


def test_it_loads_nothing_and_is_small(tmp_path: Path) -> None:
    metrics = [step(n, mfu=0.4, peak_memory_bytes=n) for n in range(1, 20_001)]
    page = write_report(made(tmp_path / "run", EVENTS, metrics)).read_bytes()
    assert len(page) < MOST_BYTES
    assert Tags(page.decode()).loaded == []
    assert "default-src 'none'" in page.decode()
    assert re.findall(rb"url\(|@import|fetch\(|XMLHttpRequest|import\(", page) == []


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    recipe: dict[str, Any] = {**RECIPE, "stages": {"model": {"use": "model.hf", "path": evil}}}
    metrics = [step(1), {"step": 1, "generated": [{"number": 0, "prompt": evil, "text": evil}]}]
    failed = [*TRAINING[:1], {"event": "run failed", "time": 1001.0, "problem": evil}]
    found = Tags(run_page(History(made(tmp_path / "run", failed, metrics, recipe))))
    assert found.tags.count("script") == 3
    assert "img" not in found.tags
    assert found.loaded == []


def test_events_are_in_order_of_time(tmp_path: Path) -> None:
    early = {"step": 6, "time": 1059.0, "ended_early": "the budget is over"}
    found = timeline(History(made(tmp_path / "run", EVENTS, [*METRICS, early])))
    assert [mark.kind for mark in found] == [
        "start", "save", "failure", "resume", "end of training", "end", "anomaly",
    ]  # fmt: skip
    assert [mark.kind for mark in found if mark.bad] == ["failure", "anomaly"]
    assert (found[4].step, found[4].text) == (6, "the budget is over")


def test_a_warning_that_comes_again_is_one_event(tmp_path: Path) -> None:
    one, other = ({"event": "warning", "text": text} for text in ("slow <disk>", "little memory"))
    at = len(TRAINING)
    events = [*EVENTS[:2], {**one, "time": 1001.0}, {**other, "time": 1002.0}, *EVENTS[2:at]]
    events += [*EVENTS[at:], {**one, "time": 1101.0}]
    history = History(made(tmp_path / "run", events, METRICS))
    found = [mark for mark in timeline(history) if mark.kind == "warning"]
    told = [(mark.time, mark.text, mark.times) for mark in found]
    assert told == [(1001.0, "slow <disk>", 2), (1002.0, "little memory", 1)]
    page = run_page(history)
    assert page.count("slow &lt;disk&gt;") == page.count("(2 times)") == 1
    assert "(1 times)" not in page


@pytest.mark.parametrize(
    ("peaks", "plan", "title"),
    [
        ({"peak_host_memory_bytes": 1}, {}, "Memory, measured"),
        ({}, {"needed_bytes": 1}, "Memory, planned"),
        ({}, {"lines": ["fits"]}, "Memory, planned"),
        ({"peak_memory_bytes": 1}, {"needed_bytes": 1}, "Memory, planned and measured"),
        ({"peak_memory_bytes": 1}, {"lines": ["fits"]}, "Memory, planned and measured"),
    ],
)
def test_memory_is_named_by_what_is_there(
    peaks: dict[str, int], plan: dict[str, Any], title: str, tmp_path: Path
) -> None:
    history = History(made(tmp_path / "run", EVENTS, [step(1, **peaks)]))
    found, rows = memory(history, plan)
    assert (found, len(rows)) == (title, len(peaks) + ("needed_bytes" in plan))


def test_axes_are_logarithmic_where_that_helps_and_it_is_said(tmp_path: Path) -> None:
    pages = []
    for number, norm in enumerate((0.5, 0.0, 9.9, 10.0)):
        metrics = [step(1), step(2, grad_norm=norm)]
        history = History(made(tmp_path / str(number), EVENTS, metrics))
        pages.append((run_page(history), comparison_page([history, history])))
    assert ['"log":true' in one for one, _ in pages] == [False, False, False, True]
    assert ["log scale" in one for one, _ in pages] == [False, False, False, True]
    assert ["log scale" in both for _, both in pages] == [False, False, False, True]


def test_answers_are_in_order(tmp_path: Path) -> None:
    records = [step(1), said(0, " \n", "x"), said(2, "b"), said(6, "d")]
    page = run_page(History(made(tmp_path / "run", EVENTS, records)))
    assert page.count("(empty answer)") == 1
    assert page.index("before training") < page.index("step 6")


def test_numbers_of_plugins_have_curves(tmp_path: Path) -> None:
    metrics = [
        *METRICS,
        {"step": 2, "accuracy": 0.5, "note": "a text", "done": True},
        {"step": 4, "accuracy": 0.75},
        step(7, router_entropy=1.5),
    ]
    history = History(made(tmp_path / "run", EVENTS, metrics))
    for page in (run_page(history), comparison_page([history, history])):
        titles = re.findall(r'<div class="plot"><h3>([^<]*?)(?: <|<)', page)
        data = {title: plot["data"] for title, plot in zip(titles, drawn(page), strict=True)}
        assert data["accuracy"][:2] == [[2, 4], [0.5, 0.75]]
        assert data["router_entropy"][:2] == [[7], [1.5]]
        assert not {"note", "done", "step", "samples", "checkpoint_stall_seconds"} & set(titles)
