"""The oracle of plans: its memory is that of real tensors, and plans are close to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from memories.cases import SMALL, llama, own
from memories.compare import job, trace_and_tensors
from memories.oracle import ResizedTracker, run

from pipeline.planning.estimate import ask_planners, combine
from pipeline.planning.forecast import BACKWARD, FORWARD, UPDATE
from pipeline.planning.trace.profiling import profile
from tests.support.tier import spread

CASES = {case.name: case for case in SMALL}


@pytest.mark.parametrize(
    "name",
    spread(
        ["DDP again, in chunks", "FSDP hybrid, late", "FSDP packed", "GPT-2", "Gemma 2",
         "LoRA, FSDP", "Mixtral", "QLoRA, FSDP", "DoRA, FSDP"], 3,
    ),
)  # fmt: skip
def test_a_trace_is_what_real_tensors_take(name: str) -> None:
    pair = trace_and_tensors(replace(CASES[name], length=64))
    assert abs(pair.error) < 0.005, f"{pair.told} instead of {pair.reference}"


def test_packed_samples_have_a_mask(tmp_path: Path) -> None:
    packed = CASES["FSDP packed"]
    cases = (replace(packed, packed=one) for one in (True, False))
    forward = [run(job(case, tmp_path, "cuda"))[FORWARD].bytes for case in cases]
    blocks, rows = 4, 256 * 256
    repeated = 2 * 256 * (256 - 128) * 2  # keys and values, once for each head
    more = blocks * (rows * 2 + repeated) + rows
    assert forward[0] - forward[1] == pytest.approx(more, rel=0.1)


def test_a_plan_is_close_in_each_phase(tmp_path: Path) -> None:
    case = replace(CASES["FSDP"], model=own(**llama(num_hidden_layers=7)))
    here = job(case, tmp_path, "cuda")
    planned, traced = combine(here.topology, ask_planners(here, profile(here))).device, run(here)
    for phase in (FORWARD, BACKWARD, UPDATE):
        assert planned[phase].bytes == pytest.approx(traced[phase].bytes, rel=0.03)


def test_resized_storages_and_the_meta_device() -> None:
    with ResizedTracker(fake=False) as tracker:
        one = torch.zeros(1000)
        torch.zeros(10_000, device="meta")
        one.untyped_storage().resize_(0)
        one.untyped_storage().resize_(800)
    assert [level.device for level in tracker.stretches[-1].levels] == [0, 4000, 0, 800]
    assert "resizing" not in torch.UntypedStorage.resize_.__qualname__
