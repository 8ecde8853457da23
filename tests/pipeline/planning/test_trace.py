"""What a trace says is what real tensors take, and two depths tell of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from memories.cases import SMALL, Case, llama, own
from memories.compare import trace_and_tensors

from pipeline.cli import main
from pipeline.planning.planner import Job
from pipeline.planning.strategy import BACKWARD, FORWARD, STEP, UPDATE, Held
from pipeline.planning.trace.run import run
from pipeline.planning.trace.structure import depths
from pipeline.planning.trace.traced import by_phase, tops_of, trace
from tests.support.tier import spread

CASES = {case.name: case for case in SMALL}


def job(case: Case, folder: Path, device: str = "cuda") -> Job:
    return Job.of(case.plan(folder, device=device), case.topology(device))


def whole(case: Case, folder: Path) -> dict[str, Held]:
    """Phase -> peak of the whole model."""
    return by_phase(tops_of(run(job(case, folder)).stretches))


def apart(told: Mapping[str, Held], reference: Mapping[str, Held]) -> float:
    """The largest relative difference of a phase's peak."""
    return max(abs(told[phase].bytes / reference[phase].bytes - 1) for phase in STEP)


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


@pytest.mark.parametrize(
    ("name", "changes", "reach", "depths"),
    [
        ("Gemma 2", {}, 1, "6 and 8"),
        ("FSDP again, accumulated", {"model": own(2, **llama(num_hidden_layers=12))}, 1, "6 and 8"),
        ("FSDP", {"strategy": {"forward_prefetch": 3}, "compute": "fp32"}, 3, "8 and 9"),
    ],
)
def test_two_depths_tell_of_all(
    name: str, changes: dict[str, Any], reach: int, depths: str, tmp_path: Path
) -> None:
    case = replace(CASES[name], length=64, **changes)
    config = {**case.model["config"], "num_hidden_layers": 12}
    deep = replace(case, model={**case.model, "config": config})
    found = trace(job(deep, tmp_path), SimpleNamespace(reach=reach))  # type: ignore[arg-type]
    assert found.how == f"model and strategy were traced, with {depths} of 12 blocks"
    assert apart(found.peaks, whole(deep, tmp_path)) < 0.002


def test_packed_samples_have_a_mask(tmp_path: Path) -> None:
    packed = CASES["FSDP packed"]
    forward = [whole(replace(packed, packed=one), tmp_path)[FORWARD].bytes for one in (True, False)]
    blocks, rows = 4, 256 * 256
    repeated = 2 * 256 * (256 - 128) * 2  # keys and values, once for each head
    more = blocks * (rows * 2 + repeated) + rows
    assert forward[0] - forward[1] == pytest.approx(more, rel=0.1)


@pytest.mark.parametrize(
    ("kinds", "reach", "expected"),
    [
        ("a" * 80, 1, (4, 5)),
        ("ab" * 20, 1, (6, 8)),
        ("d" + "a" * 39, 1, (5, 6)),
        ("aaab" * 6, 1, (12, 16)),
        ("a" * 4, 1, None),
        ("abcdefgh", 1, None),
        ("a" * 80, 3, (8, 9)),
        ("ab" * 20, 2, (8, 10)),
        ("a" * 8, 3, None),
    ],
)
def test_depths_are_whole_periods_apart_and_have_room_ahead(
    kinds: str, reach: int, expected: tuple[int, int] | None
) -> None:
    assert depths(kinds, reach) == expected


def plan(case: Case, folder: Path, *options: str) -> Any:
    case.plan(folder)
    return CliRunner().invoke(main, ["plan", str(folder / "recipe.yaml"), *options])


def test_a_traced_plan_says_what_was_traced_and_what_is_said_without(tmp_path: Path) -> None:
    case = replace(CASES["FSDP"], model=own(**llama(num_hidden_layers=7)))
    said = plan(case, tmp_path, "--trace")
    assert said.exit_code == 0, said.output
    assert "model and strategy were traced, with 4 and 5 of 7 blocks" in said.stdout
    assert "without --trace: " in said.stdout
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
