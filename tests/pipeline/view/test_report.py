"""Reports and comparisons: one file, nothing loaded, nothing of a run can break out of its text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.execution.run_state import MeanSpeed
from pipeline.view.ending import prompts
from pipeline.view.report import facts
from pipeline.view.report.compare import (
    comparison_page,
    environment_differences,
    lines,
    recipe_differences,
    results,
)
from pipeline.view.report.page import MOST_POINTS, curve
from pipeline.view.report.run_report import run_page, write_report
from pipeline.view.run import History
from tests.pipeline.view.folders import RECIPE, made, step
from tests.pipeline.view.test_live import TRAINING

MOST_BYTES = 300_000
EVENTS = [
    *TRAINING,
    {"event": "run failed", "time": 1030.0, "problem": "rank 1 was killed"},
    {"event": "run started", "time": 1040.0, "procs": 2, "device": "cpu"},
    {"event": "slot started", "slot": "train", "time": 1041.0},
    {"event": "slot finished", "slot": "train", "time": 1061.0, "digest": "", "record": None,
     "seconds": 20.0},
    {"event": "run finished", "time": 1062.0},
]  # fmt: skip
METRICS = [
    *[step(number, best_step=4, best_eval_loss=3.3) for number in range(1, 7)],
    {"step": 4, "eval_loss": 3.3, "perplexity": 27.1, "best_step": 4, "best_eval_loss": 3.3},
    {"step": 4, "time": 1020.0, "checkpoint_stall_seconds": 0.25},
    {"step": 5, "anomaly": "the loss is a spike", "action": "skip"},
    {"step": 6, "time": 1006.0, "generated": [{"number": 0, "prompt": "Once ", "text": "upon"}]},
]


class Tags(HTMLParser):
    """Collects what a page would load, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "poster") and value != "data:,":
                self.loaded.append(f"{tag} {name}={value}")


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    return tags


def test_a_report_says_what_happened(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", EVENTS, METRICS)
    page = write_report(folder).read_text("utf-8")
    for text in (
        "finished", "6 of 20", "3.4000", "3.9000 at step 1", "3.3000", "rank 1 was killed",
        "training paused for 0.25 s", "the loss is a spike: skip", "Once ", "upon",
        "stages.wrap.use", "wrap.ddp", "recipe.yaml:",
    ):  # fmt: skip
        assert text in page, text
    plots = json.loads(re.search(r'id="plots">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    loss = plots[0]
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
    told = [mark.text for mark in facts.marks(History(folder)) if mark.kind == "save"]
    assert told == [
        "on disk after 1.00 s",
        "on disk after 1.00 s, training paused for 0.25 s, steps took 0.12 s longer meanwhile, "
        "0.75 s of processor time",
    ]


def test_it_loads_nothing_and_is_small(tmp_path: Path) -> None:
    metrics = [step(n, mfu=0.4, peak_memory_bytes=n) for n in range(1, 20_001)]
    page = write_report(made(tmp_path / "run", EVENTS, metrics)).read_bytes()
    assert len(page) < MOST_BYTES
    found = parsed(page.decode())
    assert found.loaded == []
    assert "default-src 'none'" in page.decode()
    assert re.findall(rb"url\(|@import|fetch\(|XMLHttpRequest|import\(", page) == []


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    recipe: dict[str, Any] = {**RECIPE, "stages": {"model": {"use": "model.hf", "path": evil}}}
    metrics = [step(1), {"step": 1, "generated": [{"number": 0, "prompt": evil, "text": evil}]}]
    failed = [*TRAINING[:1], {"event": "run failed", "time": 1001.0, "problem": evil}]
    page = run_page(History(made(tmp_path / "run", failed, metrics, recipe)))
    found = parsed(page)
    assert found.tags.count("script") == 3
    assert "img" not in found.tags
    assert found.loaded == []


def test_the_times_of_all_starts_count(tmp_path: Path) -> None:
    history = History(made(tmp_path / "run", EVENTS, METRICS))
    assert facts.busy_seconds(history) == 30.0 + 22.0
    assert history.slots["train"].seconds == 25.0 + 20.0
    assert history.slots["model"].seconds == 3.0


def test_a_start_that_was_killed_ends_at_its_last_sign_of_life(tmp_path: Path) -> None:
    killed = [dict(one) for one in EVENTS if one["event"] != "run failed"]
    later = 90_000.0  # a day behind it
    for event, time in zip(killed[len(TRAINING) :], (0.0, 1.0, 21.0, 22.0), strict=True):
        event["time"] = later + time
    history = History(made(tmp_path / "run", killed, METRICS))
    assert facts.busy_seconds(history) == 20.0 + 22.0  # a checkpoint at 1020
    assert history.slots["train"].seconds == 15.0 + 20.0
    assert [mark.kind for mark in facts.marks(history)][:3] == ["start", "save", "stop"]


def test_a_run_that_was_killed_and_not_resumed(tmp_path: Path) -> None:
    history = History(made(tmp_path / "run", TRAINING, METRICS))
    assert history.state == "stopped"
    assert history.slots["train"].state == "stopped"
    assert facts.busy_seconds(history) == 20.0
    silent = History(made(tmp_path / "early", TRAINING))
    assert facts.busy_seconds(silent) == 5.0


def test_marks_are_in_order_of_time(tmp_path: Path) -> None:
    history = History(made(tmp_path / "run", EVENTS, METRICS))
    found = facts.marks(history)
    assert [mark.kind for mark in found] == [
        "start", "save", "failure", "resume", "end", "anomaly",
    ]  # fmt: skip
    assert [mark.kind for mark in found if mark.bad] == ["failure", "anomaly"]


def test_a_warning_that_comes_again_is_one_mark(tmp_path: Path) -> None:
    one, other = ({"event": "warning", "text": text} for text in ("slow <disk>", "little memory"))
    at = len(TRAINING)
    events = [*EVENTS[:2], {**one, "time": 1001.0}, {**other, "time": 1002.0}, *EVENTS[2:at]]
    events += [*EVENTS[at:], {**one, "time": 1101.0}]
    history = History(made(tmp_path / "run", events, METRICS))
    found = [mark for mark in facts.marks(history) if mark.kind == "warning"]
    told = [(mark.time, mark.text, mark.times) for mark in found]
    assert told == [(1001.0, "slow <disk>", 2), (1002.0, "little memory", 1)]
    page = run_page(history)
    assert page.count("slow &lt;disk&gt;") == page.count("(2 times)") == 1
    assert "(1 times)" not in page


@pytest.mark.parametrize(
    ("labels", "plan", "title"),
    [
        (["measured, host memory"], {}, "Memory, measured"),
        (["planned per GPU"], {}, "Memory, planned"),
        ([], {"lines": ["fits"]}, "Memory, planned"),
        (["planned per GPU", "measured, tensors"], {}, "Memory, planned and measured"),
        (["measured, tensors"], {"lines": ["fits"]}, "Memory, planned and measured"),
    ],
)
def test_memory_is_named_by_what_is_there(
    labels: list[str], plan: dict[str, Any], title: str
) -> None:
    assert facts.memory_title(labels, plan) == title


def test_an_early_end_of_training_is_a_mark(tmp_path: Path) -> None:
    early = {"step": 6, "time": 1059.0, "ended_early": "the budget is over"}
    found = facts.marks(History(made(tmp_path / "run", EVENTS, [*METRICS, early])))
    ends = [mark for mark in found if mark.kind == "end of training"]
    assert [(mark.step, mark.text, mark.bad) for mark in ends] == [(6, "the budget is over", False)]


def test_runs_are_compared(tmp_path: Path) -> None:
    other = {**RECIPE, "seed": 7, "stages": {**RECIPE["stages"], "wrap": {"use": "wrap.fsdp"}}}
    one = History(made(tmp_path / "one", EVENTS, METRICS))
    two = History(made(tmp_path / "two", TRAINING, METRICS[:3], other))
    differ = {row.name: row.values for row in recipe_differences([one, two])}
    assert differ == {"seed": ("-", "7"), "stages.wrap.use": ("wrap.ddp", "wrap.fsdp")}
    assert environment_differences([one, two]) == []
    found = {row.name: row.values for row in results([one, two])}
    assert found["state"] == ("finished", "stopped")
    assert found["training loss"] == ("3.4000", "3.7000")
    assert found["steps"] == ("6", "3")
    better = {row.name: row.better for row in results([one, two])}
    assert better["training loss"] == (0,)
    assert better["state"] == better["steps"] == better["tokens/s (mean)"] == ()
    page = comparison_page([one, two])
    assert parsed(page).loaded == []
    plots = json.loads(re.search(r'id="plots">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert [series["label"] for series in plots[0]["series"]] == ["one", "two"]
    assert [plot["log"] for plot in plots] == [False] * len(plots)
    assert "✓" in page


def test_of_equal_values_none_is_better(tmp_path: Path) -> None:
    """Speeds that read the same are equally good; a measurement of a plugin has no better value."""
    speeds, kinds = (100.0, 300.2, 300.4, 200.0), (None, 3.0, 2.0, 2.0)
    histories = []
    for number, (speed, loss) in enumerate(zip(speeds, kinds, strict=True)):
        metrics = [step(1, tokens_per_second=speed, loss=loss, accuracy=number / 8)]
        histories.append(History(made(tmp_path / str(number), EVENTS, metrics)))
    found = {row.name: row for row in results(histories)}
    assert found["tokens/s (mean)"].better == (1, 2)
    assert found["training loss"].better == (2, 3)
    assert found["training loss"].values[0] == "not a number"
    assert found["accuracy"].better == ()
    assert found["state"].equal
    text = "\n".join(lines(list("abcd"), recipes=[], environments=[], results=[*found.values()]))
    assert re.search(r"^tokens/s \(mean\) +100 +300 \* +300 \* +200$", text, re.MULTILINE)
    assert "the same in all: state finished" in text
    assert "recipes are the same" in text


def test_axes_are_logarithmic_where_that_helps_and_it_is_said(tmp_path: Path) -> None:
    pages = []
    for number, norm in enumerate((0.5, 0.0, 9.9, 10.0)):
        metrics = [step(1), step(2, grad_norm=norm)]
        history = History(made(tmp_path / str(number), EVENTS, metrics))
        pages.append((run_page(history), comparison_page([history, history])))
    assert ['"log":true' in one for one, _ in pages] == [False, False, False, True]
    assert ["log scale" in one for one, _ in pages] == [False, False, False, True]
    assert ["log scale" in both for _, both in pages] == [False, False, False, True]


def test_prompts_and_answers_stand_apart(tmp_path: Path) -> None:
    def said(at: int, *texts: str) -> dict[str, Any]:
        samples = [{"number": n, "prompt": f"p{n}", "text": one} for n, one in enumerate(texts)]
        return {"step": at, "time": 1000.0 + at, "generated": samples}

    records = [said(0, " \n", "x"), said(2, "b"), said(4, "c"), said(4, "again"), said(6, "d")]
    first, second = prompts(records)
    assert (first.text, second.text) == ("p0", "p1")
    ends, between = ([(a.when, a.text) for a in part] for part in (first.shown, first.between))
    assert ends == [("before training", ""), ("step 6", "d")]
    assert between == [("step 2", "b"), ("step 4", "again")]
    assert [one.text for one in second.shown] == ["x"]
    many = prompts([said(at, str(at)) for at in range(100)])
    assert [one.text for one in many[0].shown] == ["0", "99"]
    assert (many[0].left_out, len(many[0].between)) == (80, 18)
    page = run_page(History(made(tmp_path / "run", EVENTS, [step(1), *records])))
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
        plots = json.loads(re.search(r'id="plots">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
        data = {title: plot["data"] for title, plot in zip(titles, plots, strict=True)}
        assert data["accuracy"][:2] == [[2, 4], [0.5, 0.75]]
        assert data["router_entropy"][:2] == [[7], [1.5]]
        assert not {"note", "done", "step", "samples", "checkpoint_stall_seconds"} & set(titles)


def test_the_mean_speed_is_tokens_by_time() -> None:
    speed = MeanSpeed()
    for record in (
        {"step_seconds": 1.0, "tokens_per_second": 100.0, "mfu": 0.5},
        {"step_seconds": 3.0, "tokens_per_second": 300.0},
        {"tokens_per_second": 1e9},
    ):
        speed.add(record)
    assert (speed.mean("tokens_per_second"), speed.mean("mfu")) == (250.0, 0.5)
    assert (speed.steps, speed.seconds, speed.mean("data_wait_share")) == (2, 4.0, None)


@given(
    st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=60),
    st.integers(1, 20),
)
def test_a_curve_keeps_range_and_ends(values: list[float | None], most: int) -> None:
    records = [{"step": number, "x": value} for number, value in enumerate(values, start=1)]
    found = curve(records, "x", most=most)
    assert len(found.steps) == min(most, len(values))
    assert found.steps[-1] == len(values)
    known = [value for value in values if value is not None]
    if known:
        least = min(value for value in found.least if value is not None)
        greatest = max(value for value in found.greatest if value is not None)
        assert least == pytest.approx(min(known), rel=1e-4, abs=1e-300)
        assert greatest == pytest.approx(max(known), rel=1e-4, abs=1e-300)
    else:
        assert found.mean == [None] * len(found.steps)


def test_few_points_are_as_they_were() -> None:
    records = [{"step": n, "loss": n / 8} for n in range(1, MOST_POINTS + 1)]
    found = curve(records, "loss")
    assert found.mean == found.least == found.greatest == [n / 8 for n in found.steps]
