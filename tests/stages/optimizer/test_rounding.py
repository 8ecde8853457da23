"""Stochastic rounding: to a neighbour, right on average, the same bits for the same seed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.optimizer.update_rules import Noise, round_stochastically

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
