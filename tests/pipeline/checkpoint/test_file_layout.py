"""Data of any size passes to the writer in bounded memory, and arrives unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checkpoint.division import Tile
from pipeline.checkpoint.file_layout import (
    FULL,
    PASSAGE,
    SHARDED,
    FileLayout,
    RankFiles,
    Write,
    block_sums,
    plan_staging,
)
from pipeline.checkpoint.manifest import BLOCK, TensorEntry
from pipeline.utils.files import PAGE

KINDS = st.sampled_from(["F32", "BF16", "U8", "F64"])


def laid_out(sizes: list[tuple[str, int]]) -> tuple[dict[str, TensorEntry], RankFiles]:
    entries = SHARDED.in_order(
        TensorEntry(key=f"weight/{number}", dtype=dtype, shape=(count,))
        for number, (dtype, count) in enumerate(sizes)
    )
    own = [(number, Tile(0, entry.numel)) for number, entry in enumerate(entries)]
    return {entry.key: entry for entry in entries}, SHARDED.lay_out(0, own, entries)


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

    def copy(writes: Iterable[Write]) -> None:
        for write in writes:
            end = write.first_element + write.size // tensors[write.key].itemsize
            data = content(tensors, write.key, write.first_element, end)
            memory[write.buffer_offset : write.buffer_offset + write.size] = data

    copy(w for own in made.rounds for w in own if w.key and w.key not in passes)
    file, sums = bytearray(), list[int]()
    for writes in made.rounds:
        copy(write for write in writes if write.key in passes)
        for write in writes:
            # the disk fetches whole pages of the file from whole pages of memory
            assert (write.place.start + write.place_offset - write.buffer_offset) % PAGE == 0
            assert write.place.start + write.place_offset == len(file)
            data = memory[write.buffer_offset : write.buffer_offset + write.size]
            file += data
            sums += block_sums(memoryview(data)) if write.key else []
    every = [content(tensors, key, 0, entry.numel) for key, entry in tensors.items()]
    assert bytes(file) == layout.items[0].head + b"".join(every)
    assert sums == [one for data in every for one in block_sums(memoryview(data))]
    fixed = sum(len(d) + PAGE for k, d in zip(tensors, every, strict=True) if k not in passes)
    assert made.size <= len(layout.items[0].head) + fixed + passage * BLOCK + 3 * PAGE


def content(tensors: dict[str, TensorEntry], key: str, start: int, stop: int) -> bytes:
    size, seed = tensors[key].itemsize, sum(key.encode())
    return bytes((seed + at * 7 + (at >> 8)) % 251 for at in range(start * size, stop * size))


def test_a_round_is_filled_while_the_one_before_is_taken() -> None:
    tensors, layout = laid_out([("F32", 3 * BLOCK), ("F32", 2 * BLOCK)])
    made = plan_staging(layout, tensors.keys(), 4 * BLOCK)
    starts = [[write.buffer_offset for write in writes if write.key] for writes in made.rounds]
    assert len(starts) == 10
    for before, after in itertools.pairwise(starts):
        assert max(before) < min(after) or min(after) < min(before)


@pytest.mark.parametrize("arrangement", [SHARDED, FULL], ids=lambda one: one.name)
def test_every_part_of_the_buffer_can_be_viewed_in_its_dtype(arrangement: FileLayout) -> None:
    """Files in sequence hold odd numbers of items of all sizes."""
    kinds = {"weight/a": "BF16", "weight/b": "U8", "exp_avg/a": "F32", "random/0": "I64"}
    entries = arrangement.in_order(
        TensorEntry(key=key, dtype=dtype, shape=(7,)) for key, dtype in kinds.items()
    )
    sizes = {entry.key: entry.itemsize for entry in entries}
    layout = arrangement.lay_out(0, [(number, Tile(0, 7)) for number in range(4)], entries)
    staging = plan_staging(layout, {"weight/b", "exp_avg/a"})
    writes = [write for own in staging.rounds for write in own if write.key]
    assert [write.buffer_offset % sizes[write.key] for write in writes] == [0] * 4
    taken = sorted(
        (write.buffer_offset, write.buffer_offset + 7 * sizes[write.key]) for write in writes
    )
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
    assert taken[-1][1] <= staging.size


@pytest.mark.parametrize("terabytes", [0.001, 0.1, 3])
def test_memory_does_not_grow_with_what_passes(terabytes: float) -> None:
    tensors, layout = laid_out([("F32", int(terabytes * 1e12) // 12)] * 3)
    passing = plan_staging(layout, tensors.keys())
    assert passing.size <= PASSAGE + len(layout.items[0].head) + 2 * PAGE
    assert plan_staging(layout, frozenset()).size - layout.files[0][1] in range(PAGE)
