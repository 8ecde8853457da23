"""A rank's generators: streams that follow from a number, and their state."""

from __future__ import annotations

import random

import numpy as np
import torch

from pipeline.checkpoint import rng_state


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_every_generator_follows_the_number_and_its_state_can_be_put_back() -> None:
    rng_state.start_random_streams(7)
    first = draws()
    saved = rng_state.capture(torch.device("cpu"))
    second = draws()
    rng_state.start_random_streams(8)
    assert not set(draws()) & {*first, *second}
    rng_state.start_random_streams(7)
    assert draws() == first
    random.seed(0)
    rng_state.apply(saved, torch.device("cpu"))
    assert draws() == second
