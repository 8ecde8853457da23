"""`pipe plan --trace`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner, Result
from pipeline.forecast import planning
from pipeline.tracing import measured
from pipeline.tracing.training import training

from pipeline.cli import main
from pipeline.doctor.ranks import Told
from pipeline.errors import UsageError
from pipeline.plan import plan_file
from stages.train.causal_lm import TrainCausalLm
from tests.pipeline import fake_stages
from tests.support.tier import spread

ROOT = Path(__file__).parents[3]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
}
STABLELM = {
    "model_type": "stablelm", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 1000,
    "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text("text\n", "utf-8")
    return {
        "name": "traced",
        "launch": {"procs": 16, "device": "cuda"},
        "stages": {
            "model": {"use": "model.hf", "config": LLAMA},
            "precision": {"use": "precision.policy"},
            "data": {
                "use": "data.text",
                "files": str(tmp_path / "text.txt"),
                "sequence_length": 64,
            },
            "optimizer": {"use": "optimizer.adamw"},
            "wrap": {"use": "wrap.fsdp"},
            "checkpoint": {"use": "checkpoint.sharded"},
            "train": {"use": "train.causal_lm", "steps": 1, "global_batch_size": 16},
            "consolidate": {"use": "consolidate.stream"},
            "export": {"use": "export.safetensors"},
        },
    }


def plan(recipe: dict[str, Any], folder: Path, *options: str) -> Result:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    return CliRunner().invoke(main, ["plan", str(file), *options])


def test_the_table_says_what_was_traced(recipe: dict[str, Any], tmp_path: Path) -> None:
    said = plan(recipe, tmp_path, "--trace")
    assert said.exit_code == 0, said.output
    assert "model and strategy were traced, with 4 and 5 of 7 blocks" in said.output
    assert "arithmetic alone says" in said.output
    for item in ("parameters", "gradients", "optimizer state", "activations and temporaries"):
        assert f"\n{item} " in said.output


def test_levels_are_told_apart(recipe: dict[str, Any], tmp_path: Path) -> None:
    found = [json.loads(plan(recipe, tmp_path, "--json", *o).output) for o in ([], ["--trace"])]
    assert [one["level"] for one in found] == ["arithmetic", "trace"]
    peaks = [max(peak["bytes"] for peak in one["device"].values()) for one in found]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
    assert found[0]["traffic"] == found[1]["traffic"]


def test_any_model_can_be_traced(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["stages"]["model"]["config"] = STABLELM
    refused = plan(recipe, tmp_path)
    assert refused.exit_code == 1
    assert "--trace runs any model without memory" in refused.output
    found = json.loads(plan(recipe, tmp_path, "--trace", "--json").output)
    parameters = 2 * 1000 * 64 + 7 * (4 * 64 * 64 + 3 * 64 * 128 + 4 * 64) + 2 * 64
    (export,) = (file for file in found["storage"] if file["what"] == "export")
    assert export["bytes"] == 2 * parameters
    shards = found["device"]["load"]["items"]["parameters"]
    assert shards == pytest.approx(4 * parameters / 16, rel=0.01)


@pytest.mark.full
def test_compiled_updates_are_traced_uncompiled(recipe: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    recipe["launch"]["procs"] = 1  # smaller shards are not packed
    recipe["stages"]["optimizer"]["moments"] = "8bit"
    found = json.loads(plan(recipe, tmp_path, "--trace", "--json").output)
    kept = found["device"]["checkpoint"]["items"]
    assert kept["optimizer state"] == pytest.approx(kept["parameters"] / 2, rel=0.1)  # not 2 times


def test_offloading_is_computed(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["stages"]["wrap"]["cpu_offload"] = True
    found = json.loads(plan(recipe, tmp_path, "--trace", "--json").output)
    assert found["traced"].endswith("what the strategy holds was computed")
    assert found["host"]["load"]["items"]["parameters"] > 0
    assert "parameters" not in found["device"]["load"]["items"]


@pytest.mark.parametrize("wrap", spread(["wrap.fsdp", "wrap.ddp"], 1))
def test_two_real_processes_take_what_was_predicted(
    recipe: dict[str, Any], tmp_path: Path, wrap: str
) -> None:
    recipe["launch"] = {"procs": 2, "device": "cpu"}
    recipe["stages"]["wrap"]["use"] = wrap
    found = json.loads(plan(recipe, tmp_path, "--measure", "--json").output)
    assert (found["measured"]["device"], found["measured"]["ranks"]) == ("cpu", 2)
    for phase, size in found["measured"]["peaks"].items():
        # gloo's threads can let go of a buffer late
        assert 0.98 < size / found["device"][phase]["bytes"] < 1.3, phase


def test_a_measurement_without_room_is_refused(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.tracing.measured.free_memory", lambda: 1000)
    said = plan(recipe, tmp_path, "--measure")
    assert said.exit_code == 2
    assert "--measure: 16 processes on this machine's CPUs would take about" in said.output
    assert "1.0 KB are free" in said.output


def test_a_plan_that_cannot_be_saved_is_told_first(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "draw_up", lambda *_, **__: pytest.fail("measured first"))
    said = plan(recipe, tmp_path, "--measure", "--out", "no/such/folder/plan.json")
    assert said.exit_code == 2
    assert "error: No such file or directory: " in said.output
    assert "no/such/folder/plan.json" in said.output


@pytest.mark.parametrize("option", ["--trace", "--measure"])
def test_what_trains_has_to_have_a_trace(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.delattr(TrainCausalLm, "trace")
    said = plan(recipe, tmp_path, option)
    assert said.exit_code == 2, said.output
    assert (
        "cannot be traced or measured: train: train.causal_lm (what trains there has no trace)"
    ) in said.output


@pytest.mark.parametrize("option", ["--trace", "--measure"])
def test_a_stage_that_wraps_the_model_itself_is_planned_by_arithmetic_alone(
    recipe: dict[str, Any], tmp_path: Path, option: str
) -> None:
    stages = recipe["stages"]
    del stages["wrap"], stages["checkpoint"]
    stages["train"]["use"] = "train.hf_trainer"
    assert plan(recipe, tmp_path).exit_code == 0
    said = plan(recipe, tmp_path, option)
    assert said.exit_code == 2
    assert (
        "cannot be traced or measured: train: train.hf_trainer (what trains there has no trace)"
    ) in said.output


def test_one_training_without_a_trace_is_one_too_many(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    known = plan_file(file, [], forecast=True)
    (own,) = training(known)
    plugin = replace(own, slot="more", use="plugin.train", stage=fake_stages.Train(steps=1))
    with pytest.raises(UsageError, match=r"measured: more: plugin\.train \(what trains"):
        training(replace(known, steps=(*known.steps, plugin)))
    with pytest.raises(UsageError, match="measured: nothing is trained"):
        training(replace(known, steps=()))


def test_a_measurement_is_on_the_device_that_the_recipe_names(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str] = []

    def measure(target: str, settings: Any, *, procs: int, seconds: float) -> Told:
        devices.append(settings["device"])
        return Told()

    monkeypatch.setattr(measured, "gpu_count", lambda: 8)
    monkeypatch.setattr(measured, "measure", measure)
    for device in ("cpu", "cuda"):
        recipe["launch"] = {"procs": 2, "device": device}
        assert plan(recipe, tmp_path, "--measure").exit_code == 0
    assert devices == ["cpu", "cuda"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_measurement_leaves_nothing(
    recipe: dict[str, Any], tmp_path: Path, number: signal.Signals
) -> None:
    recipe["launch"] = {"procs": 2, "device": "cpu"}
    file, temporary = tmp_path / "recipe.yaml", tmp_path / "temporary"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "plan", str(file), "--measure"],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    parent, deadline = psutil.Process(process.pid), time.monotonic() + 60
    while not (ranks := parent.children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (128 + number, f"error: stopped by {number.name}\n")
    assert ranks
    assert not any(rank.is_running() for rank in ranks)
    assert list(temporary.iterdir()) == []
