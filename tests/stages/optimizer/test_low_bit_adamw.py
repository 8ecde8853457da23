"""AdamW with moments in few bits and stochastic rounding: torchao's rule, on flat parts."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import testing
from pipeline.contracts.optimizer import NamedParameter
from pipeline.errors import StageError
from stages.optimizer import torchao_compat
from stages.optimizer.adamw import AdamW
from stages.optimizer.quantized_moments import BLOCK, MOMENTS
from stages.precision.policy import PrecisionPolicy
from stages.wrap.ddp import Ddp
from tests.support.optimizers import made_of

ROWS, COLUMNS = 70, 67  # 4690: 18 blocks of 256 and 82 more


def problems(stage: AdamW, master: Any = "fp32") -> dict[str, str]:
    precision = PrecisionPolicy(compute="bf16", master=master)
    plan = testing.plan_view({"precision": precision, "optimizer": stage, "wrap": Ddp()})
    return {problem.key: str(problem) for problem in stage.check(plan)}


def make(parameter: nn.Parameter, folder: Path, **fields: Any) -> torch.optim.Optimizer:
    stage = AdamW(lr=1e-2, weight_decay=0.1, **{"kernel": "single", **fields})
    plan = stage.run(testing.context(folder, seed=5))
    return made_of(plan, [NamedParameter("w", parameter, tuple(parameter.shape))])


def trained(
    folder: Path, dtype: torch.dtype = torch.float32, steps: int = 5, **fields: Any
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(next(gradients(9)).to(dtype))
    optimizer = make(weight, folder, **fields)
    for _, gradient in zip(range(steps), gradients(1), strict=False):
        weight.grad = gradient.to(dtype)
        optimizer.step()
    return weight, optimizer


def gradients(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(ROWS, COLUMNS, generator=generator)


def reference(dtype: torch.dtype, steps: int = 5) -> torch.Tensor:
    weight = nn.Parameter(next(gradients(9)).to(dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, foreach=False)
    for _, gradient in zip(range(steps), gradients(1), strict=False):
        weight.grad = gradient.to(dtype)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(
    ("moments", "error"),
    [("fp32", 1e-6), ("bf16", 2e-3), ("8bit", 5e-3)],
)
def test_updates_follow_adamw_as_far_as_the_bits_go(
    moments: str, error: float, tmp_path: Path
) -> None:
    """The limit is on the mean error of a weight after five steps of 0.01."""
    weight, _ = trained(tmp_path, moments=moments)
    assert float((weight.detach() - reference(torch.float32)).abs().mean()) < error


def test_updates_are_those_of_torchao(tmp_path: Path) -> None:
    """torchao's own tensors and rule are used, without its compiler, on whole blocks."""
    from torchao.optim import AdamW8bit
    from torchao.optim.adam import single_param_adam

    whole = ROWS * COLUMNS - ROWS * COLUMNS % BLOCK
    theirs = nn.Parameter(next(gradients(9)).flatten()[:whole])
    optimizer = AdamW8bit([theirs], lr=1e-2, weight_decay=0.1)
    kept = [optimizer._new_buffer(theirs, signed) for signed in (True, False)]
    for step, gradient in zip(range(1, 6), gradients(1), strict=False):
        single_param_adam(
            theirs.detach(), gradient.flatten()[:whole], torch.tensor(float(step)), *kept, None,
            torch.tensor(1e-2), 0.9, 0.999, 0.1, 1e-8, True, False,
        )  # fmt: skip
    ours, _ = trained(tmp_path, moments="8bit")
    assert torch.equal(ours.detach().flatten()[:whole], theirs)


def test_weights_that_are_rounded_at_random_follow_fp32(tmp_path: Path) -> None:
    """Rounding to the nearest would lose the small updates of large weights."""
    exact, steps = nn.Parameter(torch.full((ROWS, COLUMNS), 100.0)), 40
    rounded = nn.Parameter(exact.detach().bfloat16())
    nearest = nn.Parameter(exact.detach().bfloat16())
    fields = {"moments": "fp32"}
    optimizers = [
        make(exact, tmp_path, **fields),
        make(rounded, tmp_path, stochastic_rounding=True, **fields),
        make(nearest, tmp_path, **fields),
    ]
    for _ in range(steps):
        for weight, optimizer in zip((exact, rounded, nearest), optimizers, strict=True):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    exact.requires_grad_(False)
    assert float((nearest.detach().float() - exact).abs().mean()) > 0.3
    # each update's rounding has a standard deviation of less than half a gap of 0.5
    assert (
        abs(float((rounded.detach().float() - exact).mean()))
        < 5 * 0.25 * (steps / exact.numel()) ** 0.5
    )


@pytest.mark.parametrize("moments", ["8bit", "bf16"])
@pytest.mark.parametrize("rounding", [False, True])
def test_state_that_torch_saves_and_loads_goes_on_with_the_same_bits(
    moments: str, rounding: bool, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if rounding else torch.float32
    fields: dict[str, Any] = {"moments": moments, "stochastic_rounding": rounding}
    through, _ = trained(tmp_path, dtype, steps=6, **fields)
    weight, optimizer = trained(tmp_path, dtype, steps=3, **fields)
    again = nn.Parameter(weight.detach().clone())
    loaded = make(again, tmp_path, **fields)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number, gradient in zip(range(6), gradients(1), strict=False):
        if number >= 3:
            again.grad = gradient.to(dtype)
            loaded.step()
    assert torch.equal(again, through)


def test_a_compiled_update_is_the_same(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"moments": "8bit", "stochastic_rounding": True}
    plain, eager = trained(tmp_path, torch.bfloat16, **fields)
    with torch._inductor.config.patch(compile_threads=1):
        compiled, fused = trained(tmp_path, torch.bfloat16, **fields, kernel="fused")
    assert float((compiled != plain).float().mean()) < 1e-3
    torch.testing.assert_close(compiled, plain, rtol=2**-7, atol=0)
    for name in MOMENTS:
        codes = [o.state[p][f"{name}.codes"] for o, p in ((eager, plain), (fused, compiled))]
        assert float((codes[0] != codes[1]).float().mean()) < 1e-3


def test_a_mistake_in_the_fields_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(AdamW(moments="8bit")) == {}
    assert problems(AdamW(stochastic_rounding=True), "bf16") == {}
    assert problems(AdamW(stochastic_rounding=True)) == {
        "stochastic_rounding": "stochastic_rounding: rounds to bf16, the master weights are fp32 "
        "(set master: bf16 in the precision slot)"
    }
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert problems(AdamW(moments="8bit")) == {
        "moments": "moments: needs torchao, which computes the update rule adamw_8bit "
        "(pip install 'pipetrain[torchao]')"
    }


@pytest.mark.parametrize("moments", ["4bit", "fp8"])
def test_a_storage_that_is_gone_is_an_error_that_names_the_others(moments: str) -> None:
    (problem,) = testing.problems(AdamW, {"moments": moments})
    assert problem.key == "moments"
    assert all(name in problem.message for name in ("master", "fp32", "bf16", "8bit", moments))


def test_without_torchao_the_stage_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim.quant_utils", None)
    with pytest.raises(StageError, match=r"pip install 'pipetrain\[torchao\]'"):
        AdamW(moments="8bit").run(testing.context(tmp_path))


def test_torchao_still_has_what_is_private() -> None:
    assert callable(torchao_compat.adam().single_param_adam)
    assert len(torchao_compat.quantizers().create_dynamic_map(True)) == 256
