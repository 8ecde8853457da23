"""`pipe bench`: strategies by name, short runs compared, numbers in words."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from pipeline import cli, jsonl
from pipeline.bench import measure as measuring
from pipeline.bench import plot, record, results, slots, trials
from pipeline.bench.results import Measured, Memory, Row, Speed, with_efficiency
from pipeline.bench.table import table
from pipeline.bench.trials import Length
from pipeline.bench.verdict import verdict
from pipeline.errors import PluginError, StageError, UsageError
from pipeline.forecast import phases
from pipeline.forecast.ledger import Peak
from pipeline.launch.signals import Interrupted
from pipeline.plan import make_plan, plan_file
from pipeline.presets import chosen, strategies
from pipeline.recipe import load_recipe
from pipeline.registry import Entry, Registry
from pipeline.stage import Preset, Trial
from tests.stages.data.fakes import PLAIN, FakeSource
from tests.support.pipe import REPOSITORY
from tests.support.runs import TINY

RECIPE = """\
name: small
launch: {procs: 2, device: cpu}
stages:
  model: {use: model.fake}
  data: {use: data.text, files: [./a.txt]}
  optimizer: {use: optimizer.adam, lr: 1e-4}
  wrap: {use: wrap.red, stage: 3}
  train: {use: train.lm, steps: 4000}
"""


def speed(median: float, spread: float = 0.0, steps: int = 3) -> Speed:
    return Speed(median=median, low=median - spread, high=median + spread, steps=steps)


def row(
    strategy: str, procs: int, tokens: float, spread: float = 0.0, steps: int = 3, **facts: Any
) -> Row:
    told: dict[str, Any] = {
        "data_wait_share": 0.01, "communication_share": 0.1, "first_step_seconds": 5.0,
        "checkpoint_seconds": 0.5, "checkpoint_stall_seconds": 0.1, "tokens_per_step": 64.0,
        "samples_per_step": 8, "memory": Memory(kind="device", measured=3 << 29, predicted=1 << 30),
        "steps_left_out": 0,
    } | facts  # fmt: skip
    one = Measured(tokens_per_second=speed(tokens, spread, steps), step_seconds=speed(0.5), **told)
    return Row(strategy=strategy, use=f"wrap.{strategy}", procs=procs, measured=one)


# strategies by name


def test_strategies_are_what_installed_stages_offer(registry: Registry) -> None:
    found = strategies(registry)  # broken stages are passed over
    assert {name: (one.use, dict(one.fields)) for name, one in found.items()} == {
        "blue": ("wrap.blue", {}),
        "red1": ("wrap.red", {"stage": 1}),
        "red2": ("wrap.red", {"stage": 2}),
    }


def test_built_in_strategies() -> None:
    found = strategies(Registry.installed())
    wanted = {"ddp", "fsdp", "fsdp-shard-grad-op", "fsdp-hybrid", "zero1", "zero2", "zero3"}
    assert wanted | {"zero3-offload"} <= set(found)
    assert found["zero2"].fields == {"stage": 2}


def test_an_unknown_strategy(registry: Registry) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(["blue", "red3"], registry)
    assert str(caught.value) == (
        "there is no strategy `red3` (did you mean `red2`? installed: blue, red1, red2)"
    )


def test_two_stages_of_one_strategy(fake_entry: Callable[..., Entry]) -> None:
    registry = Registry([fake_entry("wrap.blue", "Blue"), fake_entry("wrap.navy", "Blue", "other")])
    with pytest.raises(PluginError, match=r"`blue` is offered by wrap\.blue and by wrap\.navy"):
        strategies(registry)


def test_presets_that_are_none(
    fake_entry: Callable[..., Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry([fake_entry("wrap.blue", "Blue", "other")])
    monkeypatch.setattr(
        registry.load("wrap.blue"), "presets", lambda: {"b": Preset(fields={"bukket": 1})}
    )
    with pytest.raises(PluginError) as caught:
        strategies(registry)
    assert str(caught.value) == (
        "stage `wrap.blue` of other 1.0: its presets are wrong: `b` is no Preset with its fields"
    )


# arithmetic


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
    told = results.measured(records, warmup=1, began=90.0, predicted=2000)
    assert told.tokens_per_second == Speed(median=32.0, low=16.0, high=64.0, steps=3)
    assert told.step_seconds.median == 2.0
    assert (told.tokens_per_step, told.samples_per_step) == (64.0, 8)
    assert told.data_wait_share == pytest.approx(0.5 / 7)
    assert told.communication_share == 0.25
    assert told.first_step_seconds == 11.0
    assert (told.checkpoint_seconds, told.checkpoint_stall_seconds) == (0.4, 0.1)
    # not that of the profiled step, which holds the profiler's own
    assert told.memory == Memory(kind="host", measured=4000, predicted=2000)
    assert told.memory.ratio is None  # what is resident is no accuracy of what tensors take
    assert replace(told.memory, kind="device").ratio == 2.0
    with pytest.raises(ValueError, match="no step after its warm-up"):
        results.measured(records, warmup=4, began=90.0, predicted=None)
    # steps that loss scaling has left out
    for index in (1, 3, 4):
        records[index]["applied"] = False
    told = results.measured(records, warmup=1, began=90.0, predicted=None)
    assert told.tokens_per_second == Speed(median=32.0, low=32.0, high=32.0, steps=1)
    assert (told.steps_left_out, told.data_wait_share, told.communication_share) == (2, 0, None)
    records[2]["applied"] = False
    with pytest.raises(ValueError, match="no update came of any step after the warm-up"):
        results.measured(records, warmup=1, began=90.0, predicted=None)


def test_one_or_two_steps_have_no_spread() -> None:
    assert [Speed.of(range(10, 10 + n)).spread for n in (1, 2, 3)] == [None, None, 1 / 11]
    rows = with_efficiency([row("ddp", 1, 100.0, steps=2), row("ddp", 2, 100.0, steps=2)])
    assert [line.split()[3] for line in table(rows)] == ["+-", "-", "-"]
    assert verdict(rows)[:2] == [
        "fastest that fits: ddp on 1 process, 100 tokens/s; whether others are as fast takes 3 "
        "steps to tell",
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


def test_a_gain_within_the_spread_is_none() -> None:
    rows = with_efficiency([row("ddp", 1, 100.0, 3.0), row("ddp", 2, 110.0, 11.0)])
    assert verdict(rows)[1] == (
        "ddp, from 1 to 2 processes: 1.10 times as fast, indistinguishable from no gain; 55% of "
        "the ideal 2 (+- 7%)"
    )


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.05, 0.1), "data, which 5% of the step is waited for"),
        ((0.01, 0.3), "communication, 30% of the step"),
        ((0.2, 0.4), "data, which 20% of the step is waited for and communication, 40% of the"),
        ((0.01, None), "not data; communication could not be measured"),
        ((0.049, 0.29), "compute (data 5%, communication 29% of the step)"),
    ],
)
def test_bottlenecks(shares: tuple[float, float | None], expected: str) -> None:
    facts = {"data_wait_share": shares[0], "communication_share": shares[1]}
    one, scaling, bottleneck = verdict(with_efficiency([row("ddp", 1, 100.0, **facts)]))
    assert one == "fastest that fits: ddp on 1 process, 100 tokens/s"
    assert scaling == "scaling: not told, as no strategy ran on two numbers of processes"
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


# the recipe of each run


def write(strategy: str, procs: int, **length: Any) -> dict[str, Any]:
    registry = Registry.installed()
    plan = make_plan(load_recipe("r.yaml"), registry=registry)
    how = Length(**{"steps": 6, "warmup": 2, "weak": False} | length)
    (written,) = trials.write(plan, chosen([strategy], registry), [procs], how, registry=registry)
    Path("trial.yaml").write_text(written.text)
    plan_file("trial.yaml", registry=registry)
    content: dict[str, Any] = yaml.safe_load(written.text)
    return {**content, "note": written.row.note}


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A recipe of real stages, whose model has no weights anywhere, and its content."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    FakeSource(PLAIN).fast.save_pretrained("tokenizer")
    Path("text.txt").write_text("It is a truth universally acknowledged. " * 40)
    model = {"config": {**TINY, "vocab_size": 259}, "tokenizer": "./tokenizer", "init": "random"}
    stages = {
        "model": {"use": "model.hf", **model},
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {
            "use": "data.text", "files": "./text.txt", "sequence_length": 16,
            "heldout_fraction": 0.2,
        },
        "optimizer": {"use": "optimizer.adamw", "lr": 1e-3},
        "wrap": {"use": "wrap.zero", "stage": 3},
        "checkpoint": {"use": "checkpoint.deepspeed", "every": 5},
        "train": {
            "use": "train.causal_lm", "epochs": 2.0, "global_batch_size": 8,
            "micro_batch_size": 2, "accumulation": 2, "eval_every": 5,
        },
        "consolidate": {"use": "consolidate.stream"},
        "export": {"use": "export.safetensors"},
    }  # fmt: skip
    content = {"name": "r", "launch": {"procs": 2, "device": "cpu"}, "stages": stages}
    Path("r.yaml").write_text(json.dumps(content))
    return content


def test_a_trial_is_the_recipe_cut_short(real: dict[str, Any]) -> None:
    content = write("zero2", 4)
    stages = content["stages"]
    assert list(stages) == [
        "model", "precision", "data", "optimizer", "wrap", "checkpoint", "train",
    ]  # fmt: skip
    assert stages["wrap"] == {"use": "wrap.zero", "stage": 2}
    assert (stages["checkpoint"]["use"], stages["checkpoint"]["every"]) == (
        "checkpoint.deepspeed", None,
    )  # fmt: skip
    train = stages["train"]
    assert (train["steps"], train["epochs"], train["profile_steps"]) == (9, None, [9])
    assert (train["global_batch_size"], train["micro_batch_size"]) == (8, 2)
    assert train["accumulation"] is None
    assert (train["eval_every"], train["eval_last"]) == (None, False)
    assert content["launch"]["procs"] == 4
    assert content["note"] == ""


def test_a_checkpoint_slot_that_does_not_go_with_a_strategy_is_replaced(
    real: dict[str, Any],
) -> None:
    content = write("fsdp", 2)
    checkpoint = content["stages"]["checkpoint"]
    assert (checkpoint["use"], checkpoint["keep"]) == ("checkpoint.sharded", 1)
    assert content["note"] == (
        "checkpoint.sharded in place of checkpoint.deepspeed, which does not go with it"
    )


def test_weak_scaling_keeps_the_samples_of_a_process(real: dict[str, Any]) -> None:
    sizes = [write("ddp", n, weak=True)["stages"]["train"]["global_batch_size"] for n in (1, 4)]
    assert sizes == [4, 16]  # 8 on the recipe's two processes


def test_samples_of_a_process_that_cannot_stay(real: dict[str, Any]) -> None:
    arguments = ["bench", "r.yaml", "--weak", "--procs", "1,2", "train.accumulation=null"]
    result = CliRunner().invoke(cli.main, [*arguments, "train.global_batch_size=9"])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: samples per process cannot stay: 9 samples a step x 1/2 would be 4.5 "
        "(--weak needs a global batch that divides evenly)\n"
    )
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("weak", "expected"), [(False, [(8, 1), (8, 1)]), (True, [(4, 2), (16, 2)])]
)
def test_a_micro_batch_that_follows_from_the_processes_is_the_same_on_any_number(
    real: dict[str, Any], weak: bool, expected: list[tuple[int, int]]
) -> None:
    del real["stages"]["train"]["micro_batch_size"]
    Path("r.yaml").write_text(json.dumps(real))
    registry = Registry.installed()
    plan = make_plan(load_recipe("r.yaml"), registry=registry)
    length = Length(steps=6, warmup=2, weak=weak)
    written = trials.write(plan, chosen(["ddp"], registry), [1, 4], length, registry=registry)
    trains = [yaml.safe_load(each.text)["stages"]["train"] for each in written]
    assert [(t["global_batch_size"], t["micro_batch_size"]) for t in trains] == expected
    assert [each["accumulation"] for each in trains] == [None, None]


def test_a_strategy_that_can_be_shortened_is(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    blue = registry.load("wrap.blue")
    shortened = lambda self, trial: replace(self, bucket=float(trial.steps))  # noqa: E731
    monkeypatch.setattr(blue, "shortened", shortened, raising=False)
    trial = Trial(steps=7)
    assert slots.another({"use": "wrap.blue"}, trial, registry) == {
        "use": "wrap.blue", "bucket": 7.0,
    }  # fmt: skip
    wrong = {"use": "wrap.blue", "buket": 1}
    assert slots.another(wrong, trial, registry) == wrong


def test_processes_have_the_same_threads(
    real: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(load_recipe("r.yaml"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("pipeline.machine.usable_cores", lambda: 8.5)
    assert trials.threads(plan, 2) == 4
    assert trials.threads(plan, 16) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert trials.threads(plan, 2) is None


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"wrap": None, "checkpoint": None, "train": None}, "no slot that wraps the model"),
        ({"train": None}, "no slot that trains"),
    ],
)
def test_recipes_that_cannot_be_measured(
    real: dict[str, Any], slots: dict[str, None], message: str
) -> None:
    kept = {k: v for k, v in real["stages"].items() if k not in {*slots, "consolidate", "export"}}
    Path("r.yaml").write_text(json.dumps({**real, "stages": kept}))
    with pytest.raises(UsageError, match=message):
        trials.require_measurable(make_plan(load_recipe("r.yaml")))


# the command


@pytest.fixture
def bench(pipe: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command on the fake recipe; runs are made up: those in red fail, one on two
    processes is 1.5 times as fast."""

    def call(arguments: list[str], output: int, seconds: float) -> int:
        content = yaml.safe_load(Path(arguments[1]).read_text())
        run_dir = Path(arguments[3])
        run_dir.mkdir()
        if content["stages"]["wrap"]["use"] == "wrap.red":
            problem = "rank 0 failed in slot `train`: out of memory\n  at somewhere"
            jsonl.append(run_dir / "journal.jsonl", {"event": "run failed", "problem": problem})
            for name in ("checkpoints", "logs", "profile"):
                (run_dir / name).mkdir()
            return 1
        seconds = 2.0 if content["launch"]["procs"] == 1 else 4 / 3
        for number in range(content["stages"]["train"]["steps"]):
            record = {
                "step": number + 1, "loss": 1.0, "time": 2e9, "step_seconds": seconds,
                "tokens_per_second": 64 / seconds, "samples_per_second": 8 / seconds,
                "data_wait_share": 0.0,
            }  # fmt: skip
            jsonl.append(run_dir / "metrics.jsonl", record)
        return 0

    Path("a.txt").touch()
    Path("r.yaml").write_text(RECIPE)
    monkeypatch.setattr(measuring, "_call", call)
    return lambda *arguments: pipe("bench", "r.yaml", *arguments)


def test_a_run_that_fails_is_a_row(bench: Callable[..., Result]) -> None:
    result = bench("--strategies", "red1,blue", "--procs", "2,1", "--json", "--run-dir", "here")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told == json.loads(Path("here/bench.json").read_text())
    assert told["schema_version"] == 1
    rows = told["rows"]
    assert [(r["strategy"], r["procs"], r["efficiency"]) for r in rows if not r["error"]] == [
        ("blue", 1, 1.0), ("blue", 2, 0.75),
    ]  # fmt: skip
    wrong = "rank 0 failed in slot `train`: out of memory"
    assert [(r["strategy"], r["procs"], r["error"]) for r in rows if r["error"]] == [
        ("red1", 1, wrong), ("red1", 2, wrong),
    ]  # fmt: skip
    assert told["verdict"][-1] == f"did not run: red1 on 2 processes: {wrong}"
    # of those that failed, what tells why stays
    left = sorted(path.name for path in Path("here/trials").iterdir())
    assert left == ["red1-1", "red1-2"]
    assert sorted(
        str(path.relative_to("here/trials")) for path in Path("here").rglob("red1-1/**/*")
    ) == [
        "red1-1/output.txt",
        "red1-1/run",
        "red1-1/run/journal.jsonl",
        "red1-1/run/logs",
        "red1-1/trial.yaml",
    ]
    assert "blue on 2 processes" in result.stderr


def test_rows_have_the_same_keys_whether_they_ran_or_not(bench: Callable[..., Result]) -> None:
    failed, ran = json.loads(bench("--strategies", "red1,blue", "--json").stdout)["rows"]
    assert list(failed) == list(ran)
    told = {"strategy", "use", "procs", "error"}
    assert {name for name, value in failed.items() if value is not None} == told


def test_an_interrupt_keeps_the_rows_before_it(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, saved = measuring._call, []

    def interrupted_at_the_third(arguments: list[str], *rest: Any) -> int:
        file = Path("here/bench.json")
        saved.append(len(json.loads(file.read_text())["rows"]) if file.exists() else 0)
        if len(saved) == 3:
            raise Interrupted(signal.SIGINT)
        return call(arguments, *rest)

    monkeypatch.setattr(measuring, "_call", interrupted_at_the_third)
    result = bench("--strategies", "blue", "--procs", "1,2,3,4", "--run-dir", "here")
    assert result.exit_code == 130
    assert saved == [0, 1, 2]
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("blue  ")] == [
        ["blue", "1"], ["blue", "2"],
    ]  # fmt: skip
    missing = ["blue on 3 processes", "blue on 4 processes"]
    assert f"stopped by SIGINT before the end of {', '.join(missing)}" in lines
    assert result.stderr.endswith("error: stopped by SIGINT\n")
    told = json.loads(Path("here/bench.json").read_text())
    assert told["missing"] == missing
    assert [row["efficiency"] for row in told["rows"]] == [1.0, 0.75]


def test_an_interrupt_before_any_row(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> int:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(measuring, "_call", interrupted)
    result = bench("--run-dir", "here")
    assert (result.exit_code, result.stdout) == (143, "")


def test_rows_are_told_where_the_files_cannot_be_written(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "bench.json")

    monkeypatch.setattr(record, "save", full)
    monkeypatch.setattr(plot, "draw", full)
    result = bench("--strategies", "blue", "--procs", "1,2")
    assert result.exit_code == 1
    assert "blue          2        48" in result.stdout
    problem = "No space left on device: bench.json"
    assert result.stderr.count(f"  bench.json cannot be written: {problem}\n") == 2
    assert f"no bench.svg: {problem}\n" in result.stderr
    assert result.stderr.endswith(f"error: {problem}\n")


def test_the_table_comes_before_the_picture(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plot, "draw", interrupted)
    result = bench("--strategies", "blue", "--run-dir", "here")
    assert result.exit_code == 130
    assert "fastest that fits: blue on 2 processes, 48 tokens/s" in result.stdout
    assert json.loads(Path("here/bench.json").read_text())["rows"][0]["procs"] == 2


@pytest.mark.parametrize(
    ("option", "folder"), [("--run-dir", "a.txt/x"), ("--runs", "a.txt"), ("--run-dir", "/proc")]
)
def test_a_folder_that_cannot_be_written_is_found_first(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, option: str, folder: str
) -> None:
    monkeypatch.setattr(measuring, "_call", None)  # not called
    result = bench(option, folder)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert folder in line


def test_a_number_of_processes_counts_once(bench: Callable[..., Result]) -> None:
    result = bench("--strategies", "blue,blue", "--procs", "2,1,01,2", "--json")
    assert [row["procs"] for row in json.loads(result.stdout)["rows"]] == [1, 2]


def test_the_folder_that_runs_are_made_in(bench: Callable[..., Result]) -> None:
    assert bench("--strategies", "blue", "--runs", "there").exit_code == 0
    assert len(list(Path("there").glob("bench-small-*/bench.json"))) == 1
    assert not Path("runs").exists()


def test_a_run_that_takes_too_long_is_a_row(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = measuring._call

    def late(arguments: list[str], output: int, seconds: float) -> int | None:
        if "red1" not in arguments[1]:
            return call(arguments, output, seconds)
        assert seconds == 120
        journal = Path(arguments[3], "journal.jsonl")
        journal.parent.mkdir()
        jsonl.append(journal, {"event": "slot started", "slot": "train"})
        return None

    monkeypatch.setattr(measuring, "_call", late)
    result = bench("--strategies", "red1,blue", "--timeout", "2")
    assert result.exit_code == 0
    problem = "ended after 2 min in slot `train` (--timeout gives it longer)"
    assert f"red1          2  {problem}\n" in result.stdout
    assert "fastest that fits: blue on 2 processes, 48 tokens/s" in result.stdout


def test_all_runs_fail(bench: Callable[..., Result]) -> None:
    result = bench("--run-dir", "here")  # the recipe's own wrap slot, and its two processes
    assert result.exit_code == 1
    assert "wrap.red      2  rank 0 failed in slot `train`: out of memory" in result.stdout
    assert "nothing ran to its end" in result.stdout


def test_what_a_screen_shows(bench: Callable[..., Result]) -> None:
    result = bench("--strategies", "blue", "--procs", "1,2", "--steps", "3", "--keep")
    assert result.exit_code == 0, result.output
    (folder,) = Path("runs").glob("bench-small-*")
    lines = result.stdout.strip().splitlines()
    assert lines[:2] == [
        "small on cpu: median of 3 steps after 2; the global batch stays (8 samples a step)",
        "efficiency: tokens/s of a process, relative to the strategy's own run on 1 process",
    ]
    assert "blue, from 1 to 2 processes: 1.50 times as fast; 75% of the ideal 2 (+- 0%)" in lines
    assert sorted(path.name for path in (folder / "trials").iterdir()) == ["blue-1", "blue-2"]
    assert len(yaml.safe_load((folder / "trials/blue-1/trial.yaml").read_text())["stages"]) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "blu"], "error: there is no strategy `blu` (did you mean `blue`?"),
        (["--strategies", "blue,,red1"], "error: --strategies blue,,red1: an empty entry"),
        (["--procs", "1,two"], "error: --procs: `two` is no number of processes (such as 1,2,4)"),
        (["--procs", "0"], "error: --procs: `0` is no number of processes"),
        (["--procs", "1,-2"], "error: --procs: `-2` is no number of processes"),
        (["--procs", ""], "error: --procs : an empty entry"),
        (
            ["--strategies", "blue", "wrap.stage=1"],
            "error: `wrap.stage=1` has no effect: --strategies replaces the slot `wrap` (leave out",
        ),
        (["--steps", "0"], "0 is not in the range x>=1"),
        (["--run-dir", "."], "error: . already holds a benchmark"),
        (["wrap.stage=9"], "wrap.stage: must be `1`, `2` or `3`, not `9`"),
    ],
)
def test_wrong_usage(bench: Callable[..., Result], arguments: list[str], message: str) -> None:
    Path("bench.json").touch()
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_it_starts_its_own_processes(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    result = bench()
    assert result.exit_code == 2
    assert "run it without torchrun" in result.stderr


def test_a_recipe_that_is_wrong_under_a_strategy_is_a_row(tmp_path: Path) -> None:
    one = Row(strategy="s", use="wrap.zero", procs=2)
    recipe = "name: x\nstages: {wrap: {use: wrap.zeero}}\n"
    done = measuring.measure(
        one, recipe, tmp_path / "s", warmup=0, minutes=1, keep=False, registry=Registry.installed()
    )
    assert done.error.startswith("wrap.use: there is no stage `wrap.zeero` (did you mean")


def called(arguments: list[str], seconds: float) -> int | None:
    with Path("output.txt").open("wb") as output:
        return measuring._call(arguments, output.fileno(), seconds)


def test_a_run_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    os.mkfifo("r.yaml")  # nobody writes to it
    assert called(["check", "r.yaml"], 0.5) is None


def test_nothing_outlives_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = Path("script")
    script.write_text("#!/bin/sh\nsetsid sleep 600 & echo $! > pid\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script.absolute()))
    assert called([], 60) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)


def test_files_of_the_user_stand_in_for_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    Path("click.py").write_text("raise SystemExit(9)")
    assert called(["stages", "train.causal_lm"], 60) == 0


def test_memory_is_predicted_for_what_is_measured(
    real: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(load_recipe("r.yaml"))
    held = {phases.LOAD: 5, phases.BACKWARD: 7, phases.SAVE: 9, phases.RESUME: 11}
    peaks = {phase: Peak(bytes=held[phase], items={}) for phase in held}
    monkeypatch.setattr(measuring, "forecast", lambda *_: SimpleNamespace(device=peaks))
    assert measuring._predicted(plan) == 7


def test_a_run_that_is_killed_says_so(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    output.write_text("step 3\n")
    reason = measuring._reason(tmp_path, output, -signal.SIGKILL)
    assert reason.startswith("the run was killed by SIGKILL (the system does this when memory")
    assert measuring._reason(tmp_path, output, 1) == "step 3"


# the picture


def test_a_plot_is_one_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = with_efficiency([row("ddp", 1, 100.0, 2.0), row("ddp", 2, 180.0), row("fsdp", 2, 150.0)])
    for name in ("a.svg", "b.svg"):
        plot.draw(rows, tmp_path / name, "tiny")
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert ET.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert all(word in drawn for word in ("<!-- ddp -->", "<!-- fsdp -->", "<!-- ideal -->"))
    assert "<image" not in drawn
    assert 'href="http' not in drawn


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(StageError) as caught:
        plot.draw([row("ddp", 1, 100.0)], tmp_path / "a.svg", "tiny")
    assert str(caught.value) == "the plot needs matplotlib (pip install 'pipetrain[report]')"


# and all of it in earnest


def test_a_real_benchmark(real: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    options = ["--procs", "1,2", "--steps", "2", "--warmup", "1", "--json", "--run-dir", "here"]
    result = CliRunner().invoke(
        cli.main, ["bench", "r.yaml", "--strategies", "ddp,fsdp", *options], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    rows = {(r["strategy"], r["procs"]): r for r in told["rows"]}
    assert list(rows) == [("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)]
    assert all(r["error"] is None for r in rows.values())
    for (strategy, procs), one in rows.items():
        assert one["tokens_per_step"] == pytest.approx(8 * 16)
        assert one["samples_per_step"] == 8
        speed = one["tokens_per_second"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
        base = rows[strategy, 1]["tokens_per_second"]["median"]
        assert one["efficiency"] == pytest.approx(speed["median"] / procs / base)
        assert one["memory"]["kind"] == "host"
        assert one["memory"]["measured"] > 0
        assert one["memory"]["predicted"] > 0
        assert one["memory"]["ratio"] is None
        assert one["first_step_seconds"] > one["step_seconds"]["low"]
        assert one["checkpoint_seconds"] >= one["checkpoint_stall_seconds"] > 0
        assert 0 <= one["data_wait_share"] <= 1
        assert 0 <= one["communication_share"] <= 1
    assert rows["ddp", 1]["efficiency"] == 1
    assert rows["fsdp", 2]["communication_share"] > 0
    assert not Path("here/trials").exists()
