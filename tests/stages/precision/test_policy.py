"""precision.policy: its result and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.distributed.process_group import DistContext
from pipeline.testing import plan_view
from stages.precision.policy import PrecisionPolicy
from tests.support.runs import context

VIEW = plan_view({})


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"compute": "fp32", "master": "bf16"}, "master"),
        ({"compute": "fp16", "master": "fp16"}, "master"),
        ({"compute": "fp16", "master": "bf16"}, "master"),
        ({"compute": "fp16", "initial_loss_scale": 1000.0}, "initial_loss_scale"),
    ],
)
def test_combinations_that_lose_training_are_refused(fields: Any, key: str) -> None:
    assert key in {problem.key for problem in PrecisionPolicy(**fields).check(VIEW)}


def test_the_useful_combinations_pass() -> None:
    for fields in ({}, {"compute": "fp32"}, {"compute": "fp16"}, {"master": "bf16"}):
        assert list(PrecisionPolicy(**fields).check(VIEW)) == []  # type: ignore[arg-type]


def test_loss_scaling_exactly_with_fp16(tmp_path: Any) -> None:
    ctx = context(DistContext(device=torch.device("cpu")), tmp_path)
    assert PrecisionPolicy(compute="bf16").run(ctx).loss_scaling is None
    scaled = PrecisionPolicy(compute="fp16", initial_loss_scale=256.0).run(ctx).loss_scaling
    assert scaled is not None
    assert scaled.initial_scale == 256.0


def test_tf32_is_set_on_gpus_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", made.append)
    policy = PrecisionPolicy(compute="fp32", tf32=True)
    assert list(policy.check(VIEW)) == []
    for device, found in (("cpu", []), ("cuda", ["high"])):
        policy.run(context(DistContext(device=torch.device(device)), tmp_path))
        assert made == found
    PrecisionPolicy(compute="fp32").run(context(DistContext(device=torch.device("cuda")), tmp_path))
    assert made == ["high"]


def test_tf32_without_fp32_is_told() -> None:
    (told,) = PrecisionPolicy(tf32=True).check(VIEW)
    assert (told.key, told.warning) == ("tf32", True)
