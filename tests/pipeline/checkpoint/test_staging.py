"""Data of any size passes in bounded memory, and arrives unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checkpoint import block_sums
from pipeline.checkpoint.division import KeyedTile
from pipeline.checkpoint.file_layout import SHARDED, Layout
from pipeline.checkpoint.manifest import TensorEntry
from pipeline.checkpoint.staging import PASSAGE, Staging, plan_staging
from pipeline.utils.files import PAGE

KINDS = st.sampled_from(["F32", "BF16", "U8", "F64"])
BLOCK = block_sums.BLOCK


def laid_out(sizes: list[tuple[str, int]]) -> tuple[dict[str, TensorEntry], Layout]:
    entries = SHARDED.in_order(
        TensorEntry(key=f"weight/{number}", dtype=dtype, shape=(count,))
        for number, (dtype, count) in enumerate(sizes)
    )
    tensors = {entry.key: entry for entry in entries}
    spans = [KeyedTile(entry.key, 0, entry.numel) for entry in entries]
    return tensors, SHARDED.lay_out(0, spans, tensors)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(KINDS, st.integers(1, 3 * BLOCK)), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.integers(2, 5),
)
def test_rounds(sizes: list[tuple[str, int]], whole: set[int], passage: int) -> None:
    tensors, layout = laid_out(sizes)
    passes = {key for key in tensors if int(key.removeprefix("weight/")) not in whole}
    made = plan_staging(layout, passes, passage * BLOCK)
    memory = bytearray(made.size)
    for place, head in made.heads:
        memory[place : place + len(head)] = head
    for copy in made.whole:
        data = content(tensors, copy.key, copy.start, copy.start + copy.numel)
        memory[copy.place : copy.place + len(data)] = data
    file, sums = bytearray(), []
    for number, writes in enumerate(made.rounds):
        for copy in made.passing:
            if copy.round == number:
                data = content(tensors, copy.key, copy.start, copy.start + copy.numel)
                memory[copy.place : copy.place + len(data)] = data
        for write in writes:
            # the disk fetches whole pages of the file from whole pages of memory
            assert (write.extent.offset + write.begin - write.start) % PAGE == 0
            assert write.extent.offset + write.begin == len(file)
            data = memory[write.start : write.start + write.size]
            file += data
            sums += block_sums.sums(memoryview(data)) if write.piece else []
    every = [content(tensors, key, 0, entry.numel) for key, entry in tensors.items()]
    assert bytes(file) == layout.items[0].head + b"".join(every)
    assert sums == [one for data in every for one in block_sums.sums(memoryview(data))]
    fixed = sum(len(d) + PAGE for k, d in zip(tensors, every, strict=True) if k not in passes)
    assert made.size <= len(layout.items[0].head) + fixed + passage * BLOCK + 3 * PAGE


def content(tensors: dict[str, TensorEntry], key: str, start: int, stop: int) -> bytes:
    size, seed = tensors[key].itemsize, sum(key.encode())
    return bytes((seed + at * 7 + (at >> 8)) % 251 for at in range(start * size, stop * size))


def both_halves(made: Staging) -> Iterator[tuple[int, int]]:
    for number in range(len(made.rounds)):
        copies = [copy for copy in made.passing if copy.round == number]
        yield min(copy.place for copy in copies), max(copy.place for copy in copies)


def test_a_round_is_filled_while_the_one_before_is_taken() -> None:
    tensors, layout = laid_out([("F32", 3 * BLOCK), ("F32", 2 * BLOCK)])
    made = plan_staging(layout, tensors.keys(), 4 * BLOCK)
    halves = list(both_halves(made))
    assert len(halves) == 10
    for (low, high), (following, _) in itertools.pairwise(halves):
        assert high < following or following < low


@pytest.mark.parametrize("terabytes", [0.001, 0.1, 3])
def test_memory_does_not_grow_with_what_passes(terabytes: float) -> None:
    tensors, layout = laid_out([("F32", int(terabytes * 1e12) // 12)] * 3)
    passing = plan_staging(layout, tensors.keys())
    assert passing.size <= PASSAGE + len(layout.items[0].head) + 2 * PAGE
    assert plan_staging(layout, frozenset()).size - layout.files[0].size in range(PAGE)
