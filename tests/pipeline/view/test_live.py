"""The live display's text."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.execution.rundir import locked
from pipeline.hardware.telemetry import GpuReading
from pipeline.utils.files import replace_text
from pipeline.view.live import ASCII, UNICODE, drawing
from pipeline.view.run import Run
from tests.pipeline.view.folders import SLOTS, STARTED, TRAINING, add, evaluation, made, step

GIB = 1 << 30
HEADER = {"name": "made", "where": "wrap.ddp, 2 processes, cpu"}


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1065.0)


def text(
    folder: Path,
    gpus: Sequence[GpuReading] = (),
    *,
    width: int = 80,
    under_way: bool = False,
    header: Mapping[str, str] = HEADER,
    slots: Mapping[str, str] = SLOTS,
    marks: Mapping[str, str] = UNICODE,
) -> list[str]:
    """Return the lines of the display."""
    run, out = Run(folder, slots), io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    with locked(folder) if under_way else contextlib.nullcontext():
        run.look()
        console.print(drawing(run, gpus, **header, width=width, marks=marks))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_before_training(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", STARTED)
    activity = '{"name": "tokenising", "done": 250, "total": 1000, "unit": "rows", "seconds": 5.0}'
    replace_text(folder / "activity.json", activity)
    assert text(folder, under_way=True) == [
        "",
        "made  wrap.ddp, 2 processes, cpu                                            1:05",
        "✓ model  ● data 1:02  · wrap  · train  · export",
        "tokenising  ━━━━━                 250 rows of 1,000 rows  0:15 left",
    ]  # fmt: skip


def test_what_a_killed_rank_was_doing_is_not_drawn(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", STARTED, [step(1, time=1009.0)])
    replace_text(folder / "activity.json", '{"name": "tokenising", "done": 1, "total": null}')
    title, chain, training, *_ = text(folder)[1:]
    assert title.endswith(" 0:09")  # its last sign of life
    assert chain == "✓ model  ■ data  · wrap  · train  · export"
    assert training.startswith("training")


def test_texts_of_a_folder_cannot_command_the_terminal(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", STARTED)
    activity = {"name": "a\x1b[2J", "done": 2, "total": 0, "unit": "\x1b]0;b\x07", "seconds": 1}
    replace_text(folder / "activity.json", json.dumps(activity))
    header = {"name": "made\x1b[1m", "where": "\x1b[2Jcpu"}
    lines = text(folder, under_way=True, header=header, slots={"model\x9b": "model.hf"})
    assert lines[1].split() == ["made", "\\u001b[2Jcpu", "1:05"]
    assert lines[2:] == ["· model\\u009b", "a\\u001b[2J  2 \\u001b]0;b\\u0007"]


def test_a_training_that_ended_early_has_nothing_left(tmp_path: Path) -> None:
    end = {"step": 2, "time": 1030.0, "ended_early": "enough"}
    lines = text(made(tmp_path / "run", TRAINING, [step(1), step(2), end]))
    assert lines[3].rstrip().endswith("step 2 of 20")
    assert "ended early  enough" in lines
    resumed = text(made(tmp_path / "on", TRAINING, [step(1), step(2), end, step(3)]))
    assert not [line for line in resumed if line.startswith("ended early")]


def test_while_training(tmp_path: Path) -> None:
    records = [
        *[step(number) for number in range(1, 11)],
        {**evaluation(10, 3.2, 10, 3.2), "perplexity": 24.5},
        {"step": 10, "time": 1035.0, "checkpoint_stall_seconds": 0.1},
        step(11, mfu=0.412, peak_memory_bytes=58 * GIB, best_step=10, best_eval_loss=3.2),
    ]
    folder = made(tmp_path / "run", TRAINING, records)
    gpus = [
        GpuReading(
            index=number, utilisation=0.97, memory_bytes=60 * GIB, memory_total_bytes=80 * GIB,
            temperature=70 + number, watts=650.0, throttled=("power cap",) * number,
        )
        for number in range(2)
    ]  # fmt: skip
    assert text(folder, gpus)[3:] == [
        "training  ━━━━━━━━━━━           step 11 of 20  0:18 left",
        "loss      2.9000  █▇▇▆▅▅▄▃▂▂▁",
        "held out  3.2000 (step 10, best so far)",
        "step      gradient norm 0.5 · learning rate 1e-05 · 11,000 target tokens",
        "speed     512 tokens/s on average · 2 s/step · MFU 41.2 % · data wait 1.0 %",
        "memory    58.0 of 80.0 GiB",
        "2 GPUs    97 % busy · 70 to 71 °C · 650 W",
        "slowed    GPU 1 by power cap",
        "saved     step 10, 0:30 ago",
    ]
    letters = text(folder, marks=ASCII)  # of a terminal without Unicode
    assert "\n".join(letters).replace("━", "-").isascii()
    for width in (40, 60, 80, 120):
        assert all(len(line) <= width for line in text(folder, width=width))


def test_the_mean_speed_is_told_and_while_it_runs_the_newest(tmp_path: Path) -> None:
    records = [step(1, tokens_per_second=100.0), step(2, tokens_per_second=300.0, step_seconds=6.0)]
    folder = made(tmp_path / "run", TRAINING, records)
    (running,) = [line for line in text(folder, under_way=True) if line.startswith("speed")]
    assert running == ("speed     300 tokens/s now, 250 on average · 4 s/step · data wait 1.0 %")
    add(folder, [step(3, tokens_per_second=250.0, total_steps=3)])
    (last,) = [line for line in text(folder, under_way=True) if "speed" in line]
    assert last.startswith("speed     250 tokens/s on average")
    (ended,) = [line for line in text(folder) if line.startswith("speed")]
    assert ended == "speed     250 tokens/s on average · 3.33 s/step · data wait 1.0 %"


def test_the_first_and_the_best_evaluation_are_told(tmp_path: Path) -> None:
    first, second = evaluation(0, 4.0, 0, 4.0), evaluation(1, 3.0, 1, 3.0)
    records = [first, step(1), second, evaluation(2, None, 1, 3.0)]
    told = "held out  not a number (step 2) · best 3.0000 (step 1) · first 4.0000 (step 0)"
    assert told in text(made(tmp_path / "run", TRAINING, records))


def test_numbers_of_plugins_are_drawn(tmp_path: Path) -> None:
    records = [
        {"step": 1, "accuracy": 0.5}, {"step": 2, "accuracy": 0.75, "on": True, "name": "x"},
        step(2, **{"a/very/long/name/of/a/number": 1234567.0}),
        step(3, **{f"n{number}": float(number) for number in range(6)}),
    ]  # fmt: skip
    lines = text(made(tmp_path / "run", TRAINING, records))
    assert "accuracy              0.75 at step 2  ▁█" in lines
    assert "a/very/long/name/of…  1.235e+06 at step 2  ▁" in lines
    assert "n3                    3  ▁" in lines
    assert not any(line.startswith("n4 ") for line in lines)
    assert "                      2 more measurements are in the report" in lines


def test_a_mark_stays_with_its_slot(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", STARTED)
    for width in range(20, 60):
        lines = text(folder, width=width, under_way=True)[2:]
        slots = [slot for line in lines for slot in line.split("  ")]
        assert slots == ["✓ model", "● data 1:02", "· wrap", "· train", "· export"]
