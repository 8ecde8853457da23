"""Traced memory equals the memory of real tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from memories.cases import SMALL, Case, llama, own
from memories.compare import trace_and_tensors

from pipeline.cli import main
from pipeline.planning.forecast import BACKWARD, FORWARD, UPDATE
from pipeline.planning.planner import Job
from pipeline.planning.trace.run import run
from tests.support.tier import spread

CASES = {case.name: case for case in SMALL}


def job(case: Case, folder: Path, device: str = "cuda") -> Job:
    return Job.of(case.plan(folder, device=device), case.topology(device))


@pytest.mark.parametrize(
    "name",
    spread(
        ["DDP again, in chunks", "FSDP hybrid, late", "FSDP packed", "GPT-2", "Gemma 2",
         "LoRA, FSDP", "Mixtral", "QLoRA, FSDP", "DoRA, FSDP"], 4,
    ),
)  # fmt: skip
def test_a_trace_is_what_real_tensors_take(name: str) -> None:
    pair = trace_and_tensors(replace(CASES[name], length=64))
    assert abs(pair.error) < 0.005, f"{pair.told} instead of {pair.reference}"


def test_packed_samples_have_a_mask(tmp_path: Path) -> None:
    packed = CASES["FSDP packed"]
    cases = (replace(packed, packed=one) for one in (True, False))
    forward = [run(job(case, tmp_path)).peaks[FORWARD].bytes for case in cases]
    blocks, rows = 4, 256 * 256
    repeated = 2 * 256 * (256 - 128) * 2  # keys and values, once for each head
    more = blocks * (rows * 2 + repeated) + rows
    assert forward[0] - forward[1] == pytest.approx(more, rel=0.1)


def plan(case: Case, folder: Path, *options: str) -> Any:
    case.plan(folder)
    return CliRunner().invoke(main, ["plan", str(folder / "recipe.yaml"), *options])


def test_a_traced_plan_says_what_is_said_without(tmp_path: Path) -> None:
    case = replace(CASES["FSDP"], model=own(**llama(num_hidden_layers=7)))
    said = plan(case, tmp_path, "--trace")
    assert said.exit_code == 0, said.output
    assert "traced; without --trace: " in said.stdout
    found = [json.loads(plan(case, tmp_path, "--json", *o).stdout) for o in ([], ["--trace"])]
    assert [one["level"] for one in found] == ["profile", "trace"]
    for phase in (FORWARD, BACKWARD, UPDATE):
        profiled, traced = (one["device"][phase]["bytes"] for one in found)
        assert profiled == pytest.approx(traced, rel=0.03)
    assert found[0]["traffic"] == found[1]["traffic"]


def test_a_strategy_that_cannot_be_traced_says_so(tmp_path: Path) -> None:
    case = replace(CASES["FSDP"], wrap="zero", strategy={"stage": 2})
    said = plan(case, tmp_path, "--trace")
    assert said.exit_code == 2
    assert "the strategy cannot be traced" in said.output
    assert "without --trace" in said.output


def test_a_model_that_fails_is_told_in_a_sentence(tmp_path: Path) -> None:
    case = replace(CASES["FSDP"], model=own(**llama(num_key_value_heads=3)))
    said = plan(case, tmp_path)
    assert said.exit_code == 1
    (line,) = said.output.splitlines()
    assert "the model cannot be run on tensors without values: " in line
