"""Products in 8 bits beside those in bf16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from stages.model.hf import Fp8
from tests.gpu.training import Case, Trained, engine_of, made_steps, started, train


def trained_in(dist: DistContext, folder: Path, wrap: str, hf: Mapping[str, Any]) -> Trained:
    """Train in bf16 with fields of model.hf."""
    engine = engine_of(started(dist, folder), Case(wrap=wrap, compute="bf16", hf=hf))
    found = train(engine, made_steps(dist.device))
    engine.close()
    return found


def assert_close(dist: DistContext, folder: Path, wrap: str, fp8: Fp8) -> None:
    """Compare a training in 8 bits, which has to differ, with one in bf16.

    Values of 8 bits have 3 bits of mantissa, so each is wrong by 3 % or less, and sums by less.
    """
    wide = trained_in(dist, folder / "wide", wrap, {})
    narrow = trained_in(dist, folder / "narrow", wrap, {"fp8": fp8})
    assert narrow.losses != wide.losses
    assert narrow.losses == pytest.approx(wide.losses, rel=5e-3)
    assert narrow.norms == pytest.approx(wide.norms, rel=1e-1)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("wrap", ["wrap.ddp", "wrap.fsdp"])
def test_fp8(wrap: str, recipe: Any, gpu: DistContext, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the GPU does not multiply in 8 bits")
    assert_close(gpu, tmp_path, wrap, Fp8(recipe=recipe))
