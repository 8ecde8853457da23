"""Well-known models on 1 to 512 GPUs: numbers that were looked at, and the arithmetic by hand."""

from __future__ import annotations

import pytest
from pipeline.forecast.fit import Margins

from stages.wrap.ddp import Ddp
from stages.wrap.fsdp import Fsdp
from tests.support.forecasts import GIB, Told, declared
from tests.support.tier import spread

MODELS = {
    "7B": "meta-llama/Llama-2-7b-hf",
    "8B": "meta-llama/Llama-3.1-8B",
    "13B": "meta-llama/Llama-2-13b-hf",
    "30B": "huggyllama/llama-30b",
    "70B": "meta-llama/Llama-3.1-70B",
    "405B": "meta-llama/Llama-3.1-405B",
}

GOLDEN = {
    ("7B", 1): (101.5, 101.6, 101.6),
    ("7B", 8): (34.3, 15.5, 15.5),
    ("7B", 64): (26.0, 5.4, 5.4),
    ("7B", 512): (25.0, 4.4, 4.4),
    ("8B", 1): (123.6, 123.6, 123.6),
    ("8B", 8): (43.7, 20.3, 20.3),
    ("8B", 64): (33.9, 10.4, 8.1),
    ("8B", 512): (32.6, 9.1, 6.8),
    ("13B", 1): (195.5, 195.6, 195.6),
    ("13B", 8): (56.8, 28.4, 28.4),
    ("13B", 64): (40.7, 8.4, 8.4),
    ("13B", 512): (38.7, 6.4, 6.4),
    ("30B", 1): (487.1, 487.1, 487.1),
    ("30B", 8): (119.7, 66.9, 66.9),
    ("30B", 64): (79.7, 15.6, 15.6),
    ("30B", 512): (74.7, 10.6, 10.6),
    ("70B", 1): (1059.2, 1059.2, 1059.2),
    ("70B", 8): (232.0, 144.5, 144.5),
    ("70B", 64): (145.4, 32.1, 32.1),
    ("70B", 512): (134.6, 21.2, 21.2),
    ("405B", 1): (6063.3, 6063.3, 6063.3),
    ("405B", 8): (970.2, 794.3, 794.3),
    ("405B", 64): (472.8, 137.2, 137.2),
    ("405B", 512): (410.6, 67.6, 67.6),
}
"""(model, GPUs) -> GiB of tensors on each at the peak: fully sharded, one sample of 4096 tokens at
a time, in bf16 with fp32 masters; with activations computed again; and with the loss in chunks."""

ROOMS = {24: 23.6, 40: 39.4, 80: 79.2, 141: 139.8}
"""What is printed on a GPU's box -> GiB that its driver gives."""

FEWEST = {
    "7B": {24: 8, 40: 8, 80: 8, 141: 1},
    "8B": {24: 8, 40: 8, 80: 8, 141: 1},
    "13B": {24: 64, 40: 8, 80: 8, 141: 8},
    "30B": {24: 64, 40: 64, 80: 8, 141: 8},
    "70B": {24: 512, 40: 64, 80: 64, 141: 64},
    "405B": {24: None, 40: None, 80: 512, 141: 512},
}
"""Model -> memory -> on how many of 1, 8, 64, 512 GPUs the most sparing of the three fits."""


def told(model: str, gpus: int, way: int) -> Told:
    shape = declared(MODELS[model], again=way > 0)
    return Told(Fsdp(), shape, ranks=gpus, chunk=1024 if way == 2 else None)


@pytest.mark.parametrize(("model", "gpus"), spread(list(GOLDEN), 6), ids=str)
def test_the_peaks_are_what_was_looked_at(model: str, gpus: int) -> None:
    found = tuple(told(model, gpus, way).peak / GIB for way in range(3))
    assert found == pytest.approx(GOLDEN[model, gpus], abs=0.06)


@pytest.mark.parametrize("model", MODELS)
def test_which_gpus_are_enough(model: str) -> None:
    for memory, fewest in FEWEST[model].items():
        enough = [
            gpus
            for gpus in (1, 8, 64, 512)
            if Margins().of(round(GOLDEN[model, gpus][2] * GIB)) <= ROOMS[memory] * GIB
        ]
        assert (enough[0] if enough else None) == fewest, memory


SHAPES = {  # N, blocks, hidden, inner, vocabulary, width of keys
    "8B": (8_030_261_248, 32, 4096, 14336, 128256, 1024),
    "70B": (70_553_706_496, 80, 8192, 28672, 128256, 1024),
}


@pytest.mark.parametrize("model", SHAPES)
def test_full_sharding_by_hand(model: str) -> None:
    """Every item at the peak of the loss, from the architecture's numbers alone."""
    n, blocks, hidden, inner, vocabulary, keys = SHAPES[model]
    ranks, tokens, heads = 64, 4096, hidden // 128
    shape = declared(MODELS[model])
    assert shape.parameters == n
    items = Told(Fsdp(), shape, ranks=ranks).peaks()["forward and loss"].items
    shard = n / ranks
    assert items["parameters"] == pytest.approx(4 * shard, rel=1e-5)
    assert items["optimizer state"] == pytest.approx(8 * shard, rel=1e-5)
    # embedding, head and last norm stay gathered in bf16
    assert items["parameters in use"] == 2 * (2 * vocabulary * hidden + hidden)
    # logits in bf16 and fp32, and their logarithms; one number is the loss itself
    assert items["logits and loss"] == 10 * tokens * vocabulary
    # Two norms keep fp32 and bf16 of what they normalise, and what they give: 8 h each. Queries,
    # attention's output: 2 h each. Keys and values: 2 k each, and a logarithm a head. Gate, its
    # activation, up, their product: 2 f each. And a number a token for each norm.
    block = 20 * hidden + 4 * keys + 8 * inner + 4 * heads + 2 * 4
    # the last norm keeps as much as another, and what it gives is the head's input; angles in bf16
    rest = tokens * (8 * hidden + 4) + 2 * 2 * tokens * 128
    assert items["activations"] == blocks * tokens * block + rest


def test_replicated_by_hand() -> None:
    """16 bytes a parameter, and the bf16 copies that backward needs."""
    n, _, hidden, _, vocabulary, _ = SHAPES["8B"]
    peaks = Told(Ddp(), declared(MODELS["8B"]), ranks=8, accumulation=4).peaks()
    items = peaks["backward"].items
    assert items["parameters"] == 4 * n
    assert items["gradients"] == 4 * n
    assert items["optimizer state"] == 8 * n
    # all but the embedding, of which backward needs nothing
    assert items["parameters in use"] == 2 * (n - vocabulary * hidden)
    assert peaks["optimizer step"].bytes == 16 * n


def test_a_gradient_that_becomes_the_parameters_is_there_once() -> None:
    """Of one token activations are next to nothing, and backward ends with the largest gradient."""
    n, blocks, hidden, inner, vocabulary, _ = SHAPES["8B"]
    wrap = Ddp(gradient_as_bucket_view=False)
    told = Told(wrap, declared(MODELS["8B"]), ranks=8, length=1, compute="fp32")
    peak = told.peaks()["backward"].bytes
    assert 20 * n <= peak < 20 * n + 100 * (vocabulary + blocks * (hidden + inner))


def test_recomputed_blocks_keep_their_input_alone() -> None:
    hidden, blocks, tokens = 8192, 80, 4096
    items = Told(Fsdp(), declared(MODELS["70B"], again=True), ranks=64).peaks()
    kept = items["forward and loss"].items["activations"]
    rest = tokens * (8 * hidden + 4) + 2 * 2 * tokens * 128
    assert kept == blocks * tokens * 2 * hidden + rest


def test_numbers_that_circulate_are_wrong() -> None:
    """State of mixed-precision Adam is 16 bytes a parameter, on 8 GPUs 141 GB each for 70B."""
    peaks = Told(Fsdp(), declared(MODELS["70B"], again=True), ranks=8).peaks()
    state = peaks["optimizer step"]
    assert state.bytes == pytest.approx(16 * 70.55e9 / 8, rel=1e-3)
    assert state.bytes > 140e9
