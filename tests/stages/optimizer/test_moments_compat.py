"""Moments in 8 bits: the codes are torchao's, and saving them is lossless."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.optimizer.moments_compat import BLOCK, MOMENTS, SMALLEST, CodeBook, MomentCodec

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
