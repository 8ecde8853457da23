"""Lion, and AdamW with moments in few bits and stochastic rounding, by torchao's rule."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline import testing
from pipeline.contracts.optimizer import NamedParameter
from pipeline.errors import StageError
from stages.optimizer import Lion
from stages.optimizer.adamw import AdamW
from stages.optimizer.rules_compat import (
    BLOCK,
    MOMENTS,
    SMALLEST,
    CodeBook,
    MomentCodec,
    Noise,
    round_stochastically,
    torchao,
)
from stages.precision.policy import PrecisionPolicy
from stages.wrap.ddp import Ddp
from tests.support.optimizers import made_of

WEIGHT = torch.nn.Parameter(torch.zeros(3))


@given(st.floats(width=32, allow_nan=False), st.integers(0, 2**16 - 1))
def test_a_value_becomes_one_of_its_neighbours(value: float, noise: int) -> None:
    exact = torch.tensor([value])
    got = round_stochastically(exact, torch.tensor([noise], dtype=torch.int32)).float()
    low = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
    high = (low.view(torch.int32) + (1 << 16)).view(torch.float32)
    assert got.item() in (low.item(), high.item())
    if exact == low:
        assert got == exact


def test_what_is_not_finite_stays() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf")])
    got = round_stochastically(values, torch.full((3,), 65535, dtype=torch.int32))
    assert got.isnan().tolist() == [True, False, False]
    assert got[1:].tolist() == [float("inf"), -float("inf")]


def test_the_mean_is_the_value() -> None:
    """The mean is over 40,000 roundings of each value, where rounding to the nearest would be off
    by up to half a gap. The limit is five standard deviations of the mean."""
    draws, noise = 40_000, Noise(3)
    for value in (1.0 + 2**-9, 1.0 + 2**-14, -0.3, 1e-8, 77.7, -3e20):
        exact = torch.full((draws,), value)
        rounded = round_stochastically(exact, noise.bits(WEIGHT, exact, 0, 1)).double()
        gap = float(rounded.max() - rounded.min())
        assert gap > 0
        share = float((rounded == rounded.max()).double().mean())
        deviation = gap * (share * (1 - share) / draws) ** 0.5
        assert abs(float(rounded.mean()) - float(exact[0].double())) < 5 * deviation, value


def test_small_updates_are_kept_on_average() -> None:
    """In a thousand steps of a 2000th of the gap, rounding to the nearest never moves."""
    weights, noise = torch.ones(2000, dtype=torch.bfloat16), Noise(0)
    for step in range(1000):
        sums = weights.float() + 2**-7 / 2000
        weights = round_stochastically(sums, noise.bits(WEIGHT, sums, 0, step))
    # each has made the step of a whole gap with probability of about 1 / 2
    moved = float((weights.float() - 1).mean()) / 2**-7
    assert abs(moved - 0.5) < 5 * (0.25 / 2000) ** 0.5


def test_noise_is_a_function_of_seed_shard_parameter_and_update() -> None:
    other, like = torch.nn.Parameter(torch.zeros(3)), torch.zeros(50)

    def drawn(seed: int, parameter: torch.Tensor, shard: int, step: int) -> list[int]:
        noise = Noise(seed)
        noise.key(WEIGHT)
        bits: list[int] = noise.bits(parameter, like, shard, step).tolist()
        return bits

    first = drawn(1, WEIGHT, 0, 5)
    assert drawn(1, WEIGHT, 0, 5) == first
    assert min(first) >= 0
    assert max(first) < 1 << 16
    changed = [drawn(2, WEIGHT, 0, 5), drawn(1, other, 0, 5), drawn(1, WEIGHT, 1, 5)]
    assert first not in [*changed, drawn(1, WEIGHT, 0, 6)]
    state = torch.get_rng_state()
    drawn(1, WEIGHT, 0, 5)
    assert torch.equal(torch.get_rng_state(), state)  # dropout's stream is unchanged


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
    assert callable(torchao("adam").single_param_adam)
    assert len(torchao("quant_utils").create_dynamic_map(True)) == 256


def built(parameter: nn.Parameter, tmp_path: Path, **fields: float) -> torch.optim.Optimizer:
    plan = Lion(**fields).run(testing.context(tmp_path))  # type: ignore[arg-type]
    return made_of(plan, [NamedParameter("w", parameter, tuple(parameter.shape))])


def test_two_steps_by_hand(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer = built(weight, tmp_path, lr=0.1, weight_decay=0.5)
    weight.grad = torch.tensor([[3.0, -1.0]])
    optimizer.step()
    # sign(0.1 g), after a decay of lr * weight_decay; the moment is 0.01 g
    assert weight.tolist()[0] == pytest.approx([1 * 0.95 - 0.1, -2 * 0.95 + 0.1])
    assert optimizer.state[weight]["exp_avg"].tolist()[0] == pytest.approx([0.03, -0.01])
    before = weight.tolist()[0]
    weight.grad = torch.tensor([[-0.2, 0.5]])
    optimizer.step()
    # 0.9 x 0.03 - 0.1 x 0.2 > 0, 0.9 x -0.01 + 0.1 x 0.5 > 0
    assert weight.tolist()[0] == pytest.approx([before[0] * 0.95 - 0.1, before[1] * 0.95 - 0.1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moment_has_the_dtype_of_the_weight(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    optimizer = built(weight, tmp_path)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype is dtype


def test_the_numbers_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    own = nn.Parameter(torch.randn(64, 80))
    other = nn.Parameter(own.detach().clone())
    ours = built(own, tmp_path, lr=1e-3, weight_decay=0.1)
    theirs = bitsandbytes.optim.Lion([other], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(5):
        own.grad = torch.randn(64, 80)
        other.grad = own.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(own, other, rtol=0, atol=1e-6)


BOOKS = {"signed": CodeBook(signed=True), "unsigned": CodeBook(signed=False)}
CPU = torch.device("cpu")


def blocks(name: str, seed: int, scale: float) -> torch.Tensor:
    """Return blocks of very different sizes, some of one sign or of few values, one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(12, BLOCK, generator=generator)
    values *= 10.0 ** torch.randint(-6, 3, (12, 1), generator=generator) * scale
    values[1] = -values[1].abs()
    values[2] = values[2].sign() * scale
    values[3] = 0.0
    values[4, 1:] = 0.0
    return values.abs() if name == "unsigned" else values


@pytest.mark.parametrize("name", BOOKS)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-18, 1e18))
def test_what_was_decoded_is_encoded_to_the_same_bits(name: str, seed: int, scale: float) -> None:
    code = BOOKS[name]
    table = torch.tensor(code.values)
    decoded = code.decode(*code.encode(blocks(name, seed, scale), table), table)
    again = code.decode(*code.encode_exactly(decoded, table), table)
    assert torch.equal(again, decoded)


def test_encoding_plainly_would_not_do() -> None:
    """A block's largest value that is negative becomes -0.993 of itself, and again at each
    encoding."""
    code = BOOKS["signed"]
    table = torch.tensor(code.values)
    values = -torch.linspace(0.1, 1.0, 256)[None]
    once = code.decode(*code.encode(values, table), table)
    twice = code.decode(*code.encode(once, table), table)
    assert once.abs().max() < 0.994
    assert not torch.equal(once, twice)


@pytest.mark.parametrize("name", BOOKS)
@given(seed=st.integers(0, 2**31))
def test_an_error_is_at_most_half_a_gap(name: str, seed: int) -> None:
    code = BOOKS[name]
    table = torch.tensor(code.values)
    values = blocks(name, seed, 1.0)
    largest = values.abs().amax(-1, keepdim=True).clip(1e-12)
    wrong = (code.decode(*code.encode_exactly(values, table), table) - values).abs() / largest
    missing = 1 + float(table[0]) if name == "signed" else 0.0  # from -1 to the least value
    assert wrong.max() <= max(float(table.diff().max()) / 2, missing) + 1e-6
    if name == "unsigned":
        assert wrong.max() <= 0.0036


@pytest.mark.parametrize("kept", ["8bit", "bf16", "fp32", "master"])
@pytest.mark.parametrize("count", [70, SMALLEST, SMALLEST + 256 + 37])
def test_what_is_unpacked_is_packed_again_to_the_same_bits(kept: str, count: int) -> None:
    own = MomentCodec(kept)
    parameter = torch.zeros(count)
    state = own.start(parameter, count)
    generator = torch.Generator().manual_seed(1)
    for moment in MOMENTS:
        assert torch.equal(own.unpack(state, moment, 0, count), torch.zeros(count))
        values = torch.randn(count, generator=generator)
        own.pack(state, moment, values.abs() if moment == "exp_avg_sq" else values)
        held = own.unpack(state, moment, 0, count).clone()
        other = own.start(parameter, count)
        into = own.unpack(other, moment, 0, count)
        into.copy_(held)  # a live view, or a copy that is written back
        own.pack(other, moment, into)
        assert torch.equal(own.unpack(other, moment, 0, count), held)
        for start, stop in ((0, 1), (13, count - 5), (count - 1, count), (count // 2, count)):
            assert torch.equal(own.unpack(state, moment, start, stop), held[start:stop])


@pytest.mark.parametrize(("kept", "bits"), [("8bit", 8.2), ("bf16", 16), ("fp32", 32)])
def test_moments_take_so_many_bits(kept: str, bits: float) -> None:
    count = 1 << 16
    state = MomentCodec(kept).start(torch.zeros(count), count)
    assert sum(t.nbytes for t in state.values()) * 8 / (2 * count) <= bits


def test_codes_are_those_of_torchao() -> None:
    """torchao's own quantised tensors are used, in whole blocks."""
    from torchao.optim.subclass_8bit import OptimState8bit

    own, count = MomentCodec("8bit"), SMALLEST + 2 * BLOCK
    state = own.start(torch.zeros(count), count)
    for moment in MOMENTS:
        values = torch.randn(count, generator=torch.Generator().manual_seed(2))
        values = values.abs() if moment == "exp_avg_sq" else values
        theirs = OptimState8bit.zeros((count,), moment == "exp_avg", block_size=BLOCK)
        theirs.copy_(values)
        own.encode(state | own.tables(CPU), moment, values)
        assert torch.equal(state[f"{moment}.codes"].float(), theirs.codes.float())
        assert torch.equal(state[f"{moment}.scales"], theirs.scale)
        assert torch.equal(own.unpack(state, moment, 0, count), theirs.dequantize())
