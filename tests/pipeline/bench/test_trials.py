"""The recipe of each run of a benchmark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pipeline import cli
from pipeline.bench import trials
from pipeline.bench.trials import BenchLength, profiled_recipe
from pipeline.chain.plan import make_plan, plan_file
from pipeline.chain.registry import Registry
from pipeline.errors import UsageError
from pipeline.planning.planner import Planner, Planners, Trial, chosen
from pipeline.recipe import load_recipe


def write(strategy: str, procs: int, **length: Any) -> dict[str, Any]:
    registry = Registry.installed()
    plan = make_plan(load_recipe("r.yaml"), registry=registry)
    how = BenchLength(**{"steps": 6, "warmup": 2, "weak": False} | length)
    (written,) = trials.write(plan, chosen([strategy], registry), [procs], how, registry=registry)
    Path("trial.yaml").write_text(written.text)
    plan_file("trial.yaml", registry=registry)
    content: dict[str, Any] = yaml.safe_load(written.text)
    return content


def test_a_trial_is_the_recipe_cut_short(real: dict[str, Any]) -> None:
    content = write("zero2", 4)
    stages = content["stages"]
    assert list(stages) == [
        "model", "precision", "data", "optimizer", "wrap", "checkpoint", "train",
    ]  # fmt: skip
    assert stages["wrap"] == {"use": "wrap.zero", "stage": 2}
    assert (stages["checkpoint"]["use"], stages["checkpoint"]["every"]) == (
        "checkpoint.full", None,
    )  # fmt: skip
    train = stages["train"]
    assert (train["steps"], train["epochs"], train["profile_steps"]) == (9, None, [9])
    assert (train["global_batch_size"], train["micro_batch_size"]) == (8, 2)
    assert train["accumulation"] is None
    assert (train["eval_every"], train["eval_last"]) == (None, False)
    assert content["launch"]["procs"] == 4


def test_nothing_is_sent_to_trackers_and_no_texts_are_written(real: dict[str, Any]) -> None:
    tracker = {"use": "track.sqlite", "file": "./runs.sqlite"}
    real["stages"] = {"track": tracker, **real["stages"]}
    real["stages"]["train"]["generate"] = {"prompts": ["Once"], "every": 1}
    Path("r.yaml").write_text(json.dumps(real))
    profile = profiled_recipe(plan_file("r.yaml"), [2])
    for content in (write("zero2", 4), yaml.safe_load(profile)):
        assert "track" not in content["stages"]
        assert content["stages"]["train"]["generate"] is None


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
    length = BenchLength(steps=6, warmup=2, weak=weak)
    written = trials.write(plan, chosen(["ddp"], registry), [1, 4], length, registry=registry)
    trains = [yaml.safe_load(each.text)["stages"]["train"] for each in written]
    assert [(t["global_batch_size"], t["micro_batch_size"]) for t in trains] == expected
    assert [each["accumulation"] for each in trains] == [None, None]


def test_a_strategy_that_can_be_shortened_is(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def for_benchmark(self: Planner[Any], trial: Trial) -> Any:
        return replace(self.stage, bucket=float(trial.steps))

    monkeypatch.setattr(
        Planners.installed().load("wrap.blue"), "for_benchmark", for_benchmark, raising=False
    )
    trial = Trial(steps=7)
    assert trials.replacement({"use": "wrap.blue"}, trial, registry) == {
        "use": "wrap.blue", "bucket": 7.0,
    }  # fmt: skip
    wrong = {"use": "wrap.blue", "buket": 1}
    assert trials.replacement(wrong, trial, registry) == wrong


def test_processes_have_the_same_threads(
    real: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(load_recipe("r.yaml"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("pipeline.hardware.host.usable_cores", lambda: 8.5)
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
