"""Numbers of runs, as columns, sentences and a picture."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.bench.report import draw, table, verdict
from pipeline.bench.session import Memory, Row, RunMeasurement, Speed, measured, with_efficiency
from pipeline.errors import StageError


def speed(median: float, spread: float = 0.0, steps: int = 3) -> Speed:
    return Speed(median=median, low=median - spread, high=median + spread, steps=steps)


def row(
    strategy: str, procs: int, tokens: float, spread: float = 0.0, steps: int = 3, **facts: Any
) -> Row:
    told: dict[str, Any] = {
        "data_wait_share": 0.01, "communication_share": 0.1, "first_step_seconds": 5.0,
        "checkpoint_seconds": 0.5, "checkpoint_stall_seconds": 0.1, "tokens_per_step": 64.0,
        "samples_per_step": 8, "memory": Memory(kind="device", measured=3 << 29, predicted=1 << 30),
        "steps_left_out": 0, "step_seconds": speed(0.5),
    } | facts  # fmt: skip
    one = RunMeasurement(tokens_per_second=speed(tokens, spread, steps), **told)
    return Row(strategy=strategy, use=f"wrap.{strategy}", procs=procs, measured=one)


def test_efficiency_is_relative_to_the_strategys_smallest_run() -> None:
    failed = Row(strategy="a", use="wrap.a", procs=1, error="no")
    rows = [failed, row("a", 2, 100.0), row("a", 4, 150.0), row("b", 1, 80.0), row("b", 4, 240.0)]
    told = [(r.efficiency, r.efficiency_base) for r in with_efficiency(rows)]
    assert told == [(None, None), (1.0, 2), (0.75, 2), (1.0, 1), (0.75, 1)]


def test_numbers_of_a_run() -> None:
    def step(number: int, seconds: float, **more: Any) -> dict[str, Any]:
        return {
            "step": number, "loss": 1.0, "time": 100.0 + number, "step_seconds": seconds,
            "tokens_per_second": 64 / seconds, "samples_per_second": 8 / seconds,
            "data_wait_share": 0.5 if number == 2 else 0.0,
            "peak_host_memory_bytes": 1000 * number,
        } | more  # fmt: skip

    records = [
        step(1, 9.0), step(2, 1.0), step(3, 2.0), step(4, 4.0),
        step(5, 50.0, profiled=True, communication_share=0.25),
        {"step": 5, "checkpoint_stall_seconds": 0.1, "checkpoint_seconds": 0.4},
    ]  # fmt: skip

    def of(warmup: int, predicted: int | None = None) -> RunMeasurement:
        return measured(records, warmup=warmup, began=90.0, predicted=predicted)

    told = of(1, predicted=2000)
    assert told.tokens_per_second == Speed(median=32.0, low=16.0, high=64.0, steps=3)
    assert told.step_seconds.median == 2.0
    assert (told.tokens_per_step, told.samples_per_step) == (64.0, 8)
    assert told.data_wait_share == pytest.approx(0.5 / 7)
    assert told.communication_share == 0.25
    assert told.first_step_seconds == 11.0
    assert (told.checkpoint_seconds, told.checkpoint_stall_seconds) == (0.4, 0.1)
    # not the profiled step's peak, which includes the profiler's memory
    assert told.memory == Memory(kind="host", measured=4000, predicted=2000)
    assert told.memory.ratio is None  # resident memory says nothing on the accuracy for tensors
    assert replace(told.memory, kind="device").ratio == 2.0
    with pytest.raises(StageError, match="no steps were recorded after warm-up"):
        of(4)
    for index in (1, 3, 4):  # steps skipped by loss scaling
        records[index]["applied"] = False
    told = of(1)
    assert told.tokens_per_second == Speed(median=32.0, low=32.0, high=32.0, steps=1)
    assert (told.steps_left_out, told.data_wait_share, told.communication_share) == (2, 0, None)
    records[2]["applied"] = False
    with pytest.raises(StageError, match="no step after warm-up updated the model"):
        of(1)


def test_one_or_two_steps_have_no_spread() -> None:
    assert [Speed.of(range(10, 10 + n)).spread for n in (1, 2, 3)] == [None, None, 1 / 11]
    rows = with_efficiency([row("ddp", 1, 100.0, steps=2), row("ddp", 2, 100.0, steps=2)])
    assert [line.split()[3] for line in table(rows)] == ["+-", "-", "-"]
    assert verdict(rows)[:2] == [
        "fastest that fits: ddp on 1 process, 100 tokens/s; 3 steps would show whether others "
        "are as fast",
        "ddp, from 1 to 2 processes: 1.00 times as fast; 50% of the ideal 2",
    ]


def test_a_verdict_in_words() -> None:
    rows = [
        row("ddp", 1, 100.0, 2.0),
        row("ddp", 4, 300.0, 15.0),
        row("fsdp", 4, 290.0, 5.0),
        row("zero3", 4, 200.0),
        Row(strategy="zero1", use="wrap.zero", procs=1, error="out of memory"),
    ]
    assert verdict(with_efficiency(rows)) == [
        "fastest that fits: ddp on 4 processes, 300 tokens/s; indistinguishable from it within "
        "the steps' spread: fsdp on 4 processes",
        "ddp, from 1 to 4 processes: 3.00 times as fast; 75% of the ideal 4 (+- 5%)",
        "bottleneck of ddp on 4 processes: compute (data 1%, communication 10% of the step)",
        "did not run: zero1 on 1 process: out of memory",
    ]
    unsure = with_efficiency([row("ddp", 1, 100.0, 3.0), row("ddp", 2, 110.0, 11.0)])
    assert verdict(unsure)[1] == (
        "ddp, from 1 to 2 processes: 1.10 times as fast, indistinguishable from no gain; 55% of "
        "the ideal 2 (+- 7%)"
    )


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.05, 0.1), "waiting for data, 5% of the step"),
        ((0.01, 0.3), "communication, 30% of the step"),
        ((0.2, 0.4), "waiting for data, 20% of the step and communication, 40% of the"),
        ((0.01, None), "not data; communication could not be measured"),
        ((0.049, 0.29), "compute (data 5%, communication 29% of the step)"),
    ],
)
def test_bottlenecks(shares: tuple[float, float | None], expected: str) -> None:
    facts = {"data_wait_share": shares[0], "communication_share": shares[1]}
    one, scaling, bottleneck = verdict(with_efficiency([row("ddp", 1, 100.0, **facts)]))
    assert one == "fastest that fits: ddp on 1 process, 100 tokens/s"
    assert scaling == "scaling: unknown, as no strategy ran on two numbers of processes"
    assert bottleneck.startswith(f"bottleneck of ddp on 1 process: {expected}")


def test_a_table_is_aligned() -> None:
    rows = [
        *with_efficiency([row("ddp", 1, 12345.0, 100.0)]),
        row("fsdp", 16, 9.0, communication_share=None, memory=Memory(kind="host")),
        Row(strategy="zero3-offload", use="wrap.zero", procs=2, error="it broke"),
    ]
    head, first, second, third = table(rows)
    assert first.split() == [
        "ddp", "1", "12,345", "1%", "0.5", "100%", "1.50", "GiB", "1.00", "GiB", "1.50", "1.0%",
        "10.0%", "5.0", "s", "0.50", "s",
    ]  # fmt: skip
    assert second.split() == [
        "fsdp", "16", "9", "0%", "0.5", "-", "-", "-", "-", "1.0%", "-", "5.0", "s", "0.50", "s",
    ]  # fmt: skip
    assert len(head) == len(first) == len(second)
    assert third == "zero3-offload      2  it broke"


def test_a_plot_is_one_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = with_efficiency([row("ddp", 1, 100.0, 2.0), row("ddp", 2, 180.0), row("fsdp", 2, 150.0)])
    for name in ("a.svg", "b.svg"):
        draw(rows, tmp_path / name, "tiny")
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert ET.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert all(word in drawn for word in ("<!-- ddp -->", "<!-- fsdp -->", "<!-- ideal -->"))
    assert "<image" not in drawn
    assert 'href="http' not in drawn


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(StageError) as caught:
        draw([row("ddp", 1, 100.0)], tmp_path / "a.svg", "tiny")
    assert str(caught.value) == "the plot needs matplotlib (pip install 'pipetrain[report]')"
