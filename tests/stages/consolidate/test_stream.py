"""Tensors of a checkpoint in any format stream out unchanged, into files that safetensors reads."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from pipeline.checkpoint.formats import Formats
from pipeline.checkpoint.write_plan import CODES
from pipeline.contracts.engine import WEIGHT, EngineState
from pipeline.contracts.training import Progress
from pipeline.distributed.process_group import DistContext
from pipeline.errors import CheckpointError, UsageError
from stages.consolidate.stream import CheckpointWeights, open_weights
from stages.export.target import BLOCK
from stages.export.weight_files import check, head, planned, shards, write
from stages.formats.stored import MappedSource, Stored, joined
from tests.support.tier import examples

HERE = DistContext(device=torch.device("cpu"))


def tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Draw a tensor of any bits, NaN and infinities among them."""
    draw = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    data = torch.randint(0, top, (size,), generator=draw, dtype=torch.uint8)
    return data.view(dtype).view(tuple(shape))


def cut(whole: torch.Tensor, edges: Sequence[float]) -> Stored:
    """Cut into consecutive parts, as ranks save them; each is in a larger tensor of its own."""
    flat = whole.reshape(-1)
    places = sorted({0, flat.numel(), *(int(edge * flat.numel()) for edge in edges)})
    parts = []
    for start, stop in itertools.pairwise(places):
        held = torch.cat([flat[:1], flat[start:stop], flat[:1]])
        parts.append(held[1:-1])
    return joined(whole.shape, parts or [flat])


def source(stored: Mapping[str, Stored]) -> MappedSource:
    names = list(stored)
    return MappedSource(
        where="memory", step=3, world_size=2, writer={}, progress=vars(Progress(step=3, samples=6)),
        state=EngineState(
            aliases={"other": names[0]}, frozen=names, groups=[], updates={},
            loss_scale=None,
        ),
        stored={f"{WEIGHT}/{name}": value for name, value in stored.items()},
    )  # fmt: skip


TENSORS = st.lists(
    st.builds(
        tensor,
        st.lists(st.integers(0, 7), max_size=4),
        st.sampled_from(sorted(CODES, key=str)),
        st.integers(0, 999),
    ),
    min_size=1,
    max_size=8,
).map(lambda found: {f"layer.{number}.weight": one for number, one in enumerate(found)})
EDGES = st.lists(st.floats(0, 1), max_size=3)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether two tensors are the same to the bit, in any dtype."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return False
    one, other = (t.contiguous().view(-1).view(torch.uint8) for t in (found, wanted))
    return torch.equal(one, other)


@pytest.mark.parametrize("form", ["canonical", "full", "dcp"])
@examples(25)
@given(tensors=TENSORS, edges=EDGES)
def test_every_format(form: str, tensors: Mapping[str, torch.Tensor], edges: list[float]) -> None:
    kept = {name: one for name, one in tensors.items() if one.numel()}
    if not kept:
        return
    with tempfile.TemporaryDirectory() as folder:
        writing = Formats.installed().get(form)
        target = writing.target(Path(folder) / "state", 3)
        writing.write(source({name: cut(one, edges) for name, one in kept.items()}), target)
        weights = open_weights(str(target))
        # This format does not record which names are tied.
        assert set(weights.names()) - {"other"} == kept.keys()
        for name, one in kept.items():
            assert weights.spec(name) == (tuple(one.shape), one.dtype)
            assert same(weights.read(name), one), name
        weights.close()


@examples(60)
@given(tensors=TENSORS, limit=st.integers(1, 2000), edges=EDGES, data=st.data())
def test_files(
    tensors: Mapping[str, torch.Tensor], limit: int, edges: list[float], data: st.DataObject
) -> None:
    stored = {name: cut(one, edges) for name, one in tensors.items()}
    weights = CheckpointWeights(source(stored), "memory")
    with tempfile.TemporaryDirectory() as folder:
        parts = shards({name: weights.spec(name) for name in tensors}, limit)
        found: dict[str, torch.Tensor] = {}
        written = write(Path(folder), parts, weights, HERE, lambda size: None)
        for name, part in written.items():
            assert check(Path(folder) / name, part, HERE) == []
            found |= load_file(Path(folder) / name)
        assert found.keys() == tensors.keys()
        for name, one in tensors.items():
            assert same(found[name], one), name
        file, last = Path(folder, list(written)[-1]), [*written.values()][-1]
        _flip_one_bit(file, len(head(last)), data)
        assert len(check(file, last, HERE)) == (last.size > len(head(last)))


def _flip_one_bit(file: Path, start: int, data: st.DataObject) -> None:
    content = bytearray(file.read_bytes())
    if len(content) > start:
        content[data.draw(st.integers(start, len(content) - 1))] ^= 1
        file.write_bytes(content)


def test_a_tensor_of_several_blocks(tmp_path: Path) -> None:
    big = torch.arange(BLOCK // 4 * 2 + 12345, dtype=torch.int32)
    weights = CheckpointWeights(source({"a": cut(big, [0.3, 0.9])}), "memory")
    files = {"one.safetensors": planned({"a": weights.spec("a")})}
    (written,) = write(tmp_path, files, weights, HERE, lambda size: None).values()
    assert [len(one) for one in written.sums.values()] == [3]
    assert torch.equal(load_file(tmp_path / "one.safetensors")["a"], big)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint of a known format"):
        open_weights(str(tmp_path))
    with pytest.raises(UsageError, match="no such folder"):
        open_weights(str(tmp_path / "nothing"))
    writing = Formats.installed().get("canonical")
    target = writing.target(tmp_path, 3)
    writing.write(source({"a": cut(torch.ones(9), [])}), target)
    weights = open_weights(str(target))
    with pytest.raises(CheckpointError, match=r"holds no tensor b"):
        weights.read("b")
    assert same(weights.read("other"), torch.ones(9))


def test_another_checkpoint_has_another_identity(tmp_path: Path) -> None:
    writing = Formats.installed().get("canonical")
    made = []
    for number in (1, 2):
        target = writing.target(tmp_path / str(number), 3)
        writing.write(source({"a": cut(torch.full((9,), float(number)), [])}), target)
        made.append(open_weights(str(target)).identity)
        assert open_weights(str(target)).identity == made[-1]
    assert made[0] != made[1]
