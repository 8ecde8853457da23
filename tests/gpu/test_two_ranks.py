"""Two ranks that share one GPU, over gloo, against a plain loop: NCCL refuses two on a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.contracts.engine import WEIGHT
from pipeline.distributed.environment import LOOPBACK
from pipeline.distributed.process_group import DistContext
from tests.gpu.training import Case, apart, engine_of, made_steps, plain, source, started, train
from tests.support.processes import run_ranks


def both(dist: DistContext, folder: str, device: str, case: Case) -> dict[str, Any]:
    """Train on this rank's share, and the whole in the plain loop; return the numbers of both, and
    the distances of this rank's weights."""
    os.environ["LOCAL_RANK"] = "0"  # which torch takes for the number of a device
    torch.set_float32_matmul_precision("highest")
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    dist = replace(dist, device=place)
    ctx, steps = started(dist, folder), made_steps(place)
    expected, before, after = plain(source(ctx, case), steps, case.compute, place)
    engine = engine_of(ctx, case)
    found = train(engine, steps)
    distances = apart(engine, before, after)
    facts = dict(engine.describe())
    elements = sum(fragment.state[WEIGHT].numel() for fragment in engine.fragments())
    engine.close()
    return {
        "found": vars(found),
        "expected": vars(expected),
        "distances": distances,
        "device": facts["device"],
        "elements": elements,
    }


def assert_ranks(folder: Path, device: str, wrap: str) -> None:
    """Run `both` on two ranks, which have half of a sharded model each."""
    first, second = run_ranks(both, 2, str(folder), device, Case(wrap=wrap), limit=60)
    assert first["device"] == second["device"] == device
    if wrap == "wrap.fsdp":
        whole = sum(after.numel() for after in plain_weights(folder))
        assert first["elements"] + second["elements"] == whole
    for rank in (first, second):
        found, expected = rank["found"], rank["expected"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert rank["distances"]
        assert max(rank["distances"].values()) < 1e-3, rank["distances"]


def plain_weights(folder: Path) -> list[torch.Tensor]:
    """Return the parameters of the model, tied ones once."""
    ctx = started(DistContext(device=torch.device("cpu")), folder)
    return list(source(ctx, Case()).build().parameters())


@pytest.mark.parametrize("wrap", ["wrap.ddp", "wrap.fsdp"])
def test_two_ranks(wrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", LOOPBACK)
    assert_ranks(tmp_path, "cuda", wrap)
