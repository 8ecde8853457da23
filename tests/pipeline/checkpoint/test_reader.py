"""Any range of any tensor, however it was cut, is read as it was written."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from pipeline.checkpoint import block_sums
from pipeline.checkpoint.division import KeyedTile, Run, require_cover
from pipeline.checkpoint.file_layout import SHARDED
from pipeline.checkpoint.local_store import LocalStore
from pipeline.checkpoint.manifest import Manifest, RankShare, TensorEntry
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.write_plan import spans_of
from tests.support.tier import examples
from tests.support.tiny_store import job

NAME = "step-00000001"


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[TensorEntry], list[list[KeyedTile]]]:
    """Draw tensors, and the parts that each rank writes."""
    ranks = draw(st.integers(1, 3))
    tensors: list[TensorEntry] = []
    shares: list[list[KeyedTile]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(["F64", "F32", "BF16", "U8"]))
        length = draw(st.integers(1, 3 * block_sums.BLOCK))
        tensors.append(TensorEntry(key=f"weight/{number}", dtype=dtype, shape=(length,)))
        cuts = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4))
        edges = sorted({0, *cuts, length})
        for start, stop in itertools.pairwise(edges):
            span = KeyedTile(tensors[-1].key, start, stop)
            shares[draw(st.integers(0, ranks - 1))].append(span)
    return tensors, shares


def content(tensor: TensorEntry) -> bytes:
    """Return bytes that differ from place to place."""
    return random.Random(tensor.key).randbytes(tensor.numel * tensor.itemsize)


def write(root: str, tensors: list[TensorEntry], shares: list[list[KeyedTile]]) -> None:
    """Write a checkpoint by hand, without the writer."""
    ordered = SHARDED.in_order(tensors)
    table = {tensor.key: tensor for tensor in ordered}
    runs = [
        sorted(
            Run(span.start, span.stop, span.stop - span.start, rank)
            for rank, share in enumerate(shares)
            for span in share
            if span.key == tensor.key
        )
        for tensor in ordered
    ]
    store = LocalStore(root)
    attempt = store.begin(NAME, "x")
    files, parts = [], []
    for rank in range(len(shares)):
        layout = SHARDED.lay_out(rank, spans_of(rank, ordered, runs), table)
        memory, sums = bytearray(layout.items[0].head), []
        for _, extent, _, span, _ in layout.items[1:]:
            assert extent == (len(memory), 0, 0)
            assert span is not None
            size = table[span.key].itemsize
            data = content(table[span.key])[span.start * size : span.stop * size]
            memory += data
            sums += block_sums.sums(memoryview(data))
        attempt.put(layout.files[0].name, bytes(memory))
        attempt.put(f"rank-{rank:05d}.sums", block_sums.pack(sums))
        files += layout.described
        digest = xxh3_64_intdigest(block_sums.pack(sums))
        parts.append(RankShare(sums=f"rank-{rank:05d}.sums", digest=digest))
    facts: dict[str, Any] = json.loads(json.dumps(dict(job(1, "x").facts)))
    manifest = Manifest(
        **facts,
        written="2026-01-01",
        world_size=2,
        writer={},
        tensors=ordered,
        runs=runs,
        files=files,
        parts=parts,
    )
    store.commit(attempt, manifest.dump())


@given(layouts(), st.data())
@examples(60)
def test_any_range(
    layout: tuple[list[TensorEntry], list[list[KeyedTile]]], data: st.DataObject
) -> None:
    tensors, shares = layout
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sums, "CHUNK", block_sums.BLOCK * data.draw(st.integers(1, 3)))
        write(root, tensors, shares)
        opened = CheckpointReader(LocalStore(root), NAME)
        for _ in range(6):
            tensor = data.draw(st.sampled_from(tensors))
            start = data.draw(st.integers(0, tensor.numel))
            stop = data.draw(st.integers(start, tensor.numel))
            before = opened.bytes_read
            found = [(first, bytes(part)) for first, part in opened.read(tensor.key, start, stop)]
            size = tensor.itemsize
            ranges = [(first - start, first - start + len(part) // size) for first, part in found]
            assert ranges == sorted(ranges)
            require_cover(ranges, stop - start)
            expected = content(tensor)[start * size : stop * size]
            assert b"".join(part for _, part in found) == expected
            pieces = sum(len(share) for share in shares)
            assert opened.bytes_read - before <= len(expected) + 2 * block_sums.BLOCK * pieces
            memory = bytearray(len(expected))
            opened.read_into(tensor.key, start, memoryview(memory))
            assert memory == expected
        opened.verify()
        opened.close()
