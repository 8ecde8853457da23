"""Converted tensors: any range equals converting whole ones, and moved rows cost their own bytes.

Conversions of real architectures only move rows; the conversions here also do everything that could
look like it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from pipeline.contracts.model import TensorReader, TensorSpec
from pipeline.errors import StageError
from stages.model import compat
from stages.weights import converted
from stages.weights.converted import Change, ConvertedReader, Runs, renamed, trace
from stages.weights.files import SafetensorsReader
from stages.weights.views import MemoryReader
from tests.support.models import FAMILIES, filled, random_source
from tests.support.readers import (
    FLOATS,
    random_bits,
    ranges,
    raw,
    require_cast,
    require_equal,
    require_range,
)
from tests.support.tier import examples

Step = Callable[[list[Tensor]], list[Tensor]]
STORED = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int32])
LITTLE = st.integers(0, 3)
FACTOR = st.integers(2, 8)
WORTHWHILE = converted.WORTHWHILE


@pytest.fixture(params=["every run", "long runs"], scope="module")
def worth(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose whether short runs, as all runs here are, are read one by one."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "every run":
            patch.setattr(converted, "WORTHWHILE", 0)
        yield request.param


# Steps of conversions. No step looks at a shape to decide.


def each(function: Callable[[Tensor], Tensor]) -> Step:
    return lambda tensors: [function(tensor) for tensor in tensors]


def stacked(dim: int) -> Step:
    return lambda tensors: [torch.stack(tensors, dim)]


def joined(dim: int) -> Step:
    return lambda tensors: [torch.cat(tensors, dim)]


def chunks(count: int, dim: int) -> Step:
    return lambda tensors: [part for tensor in tensors for part in tensor.chunk(count, dim)]


def cut(factor: int, dim: int) -> Step:
    """Split one axis into two."""
    return each(lambda t: t.unflatten(dim, (factor, -1)))


def regrouped(factor: int, dim: int) -> Step:
    """Interleave the parts of an axis, as in rotary heads."""
    first, second = (dim, dim + 1) if dim >= 0 else (dim - 1, dim)
    return each(
        lambda t: t.unflatten(dim, (factor, -1)).transpose(first, second).flatten(first, second)
    )


ROWS: dict[str, Any] = {
    "stack": st.builds(stacked, LITTLE),
    "join": st.builds(joined, LITTLE),
    "chunk": st.builds(chunks, FACTOR, LITTLE),
    "cut": st.builds(cut, FACTOR, LITTLE),
    "merge": st.just(each(lambda t: t.flatten(0, 1))),
    "regroup": st.builds(regrouped, FACTOR, LITTLE),
    "turn round": st.just(each(lambda t: t.flip(0))),
    "repeat": st.just(each(lambda t: t.repeat_interleave(2, 0))),
    "other order": st.just(lambda tensors: tensors[::-1]),
    "some": st.just(lambda tensors: tensors[1:]),
}
OTHERS: dict[str, Any] = {
    "join columns": st.just(joined(-1)),
    "chunk columns": st.builds(chunks, FACTOR, st.just(-1)),
    "cut columns": st.builds(cut, FACTOR, st.just(-1)),
    "regroup columns": st.builds(regrouped, FACTOR, st.just(-1)),
    "roll columns": st.builds(lambda by: each(lambda t: t.roll(by, -1)), st.integers(1, 8)),
    "turn columns round": st.just(each(lambda t: t.flip(-1))),
    "narrow columns": st.builds(lambda to: each(lambda t: t[..., :to]), FACTOR),
    "transpose": st.just(each(lambda t: t.transpose(0, -1))),
    "flatten": st.just(each(lambda t: t.flatten())),
    "affine": st.builds(lambda a, b: each(lambda t: a * t + b), FACTOR, LITTLE),
    "shift": st.builds(lambda by: each(lambda t: t + by), st.integers(1, 70)),
    "mean": st.just(lambda tensors: [sum(tensors) / len(tensors)]),
    "difference": st.just(lambda tensors: [3 * tensors[-1] - tensors[0]]),
    "cast": st.builds(lambda dtype: each(lambda t: t.to(dtype)), FLOATS),
}


def made_by(steps: Sequence[Step], sources: Sequence[str]) -> Change:
    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = [tensors[name] for name in sources]
        for step in steps:
            found = step(found)
        return {f"made {number}": tensor for number, tensor in enumerate(found)}

    return Change(sources=tuple(sources), convert=convert)


@st.composite
def sources(draw: Any) -> dict[str, Tensor]:
    """Draw one to three tensors of one dtype, usually of one shape."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4))
    dtype, seed = draw(STORED), draw(st.integers(0, 2**32))
    shapes = [shape] * draw(st.integers(1, 3))
    if draw(st.booleans()):
        shapes[-1] = [draw(st.integers(0, 5)), *shape[1:]]
    dtypes = [dtype] * len(shapes)
    if draw(st.integers(0, 9)) == 0:
        dtypes[-1] = draw(STORED)
    return {
        f"source {number}": random_bits(one, kind, seed + number)
        for number, (one, kind) in enumerate(zip(shapes, dtypes, strict=True))
    }


def draw_change(data: st.DataObject, held: Mapping[str, Tensor], kinds: Mapping[str, Any]) -> Any:
    """Draw a change of one to four steps that these tensors admit, and its result."""
    steps: list[Step] = []
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(list(kinds)))
        step = data.draw(kinds[kind], label=kind)
        if works(made_by([*steps, step], list(held)), held):
            steps.append(step)
    change = made_by(steps, list(held))
    return change, change.convert(held)


def works(change: Change, held: Mapping[str, Tensor]) -> bool:
    try:
        return bool(change.convert(held))
    except (RuntimeError, ValueError, IndexError):
        return False


def specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def traced(change: Change, held: Mapping[str, Tensor]) -> Runs | None:
    return trace(change, specs(held), specs(change.convert(held)))


def in_file(folder: Path, held: Mapping[str, Tensor]) -> SafetensorsReader:
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "x")
    return SafetensorsReader([folder / "x"])


@examples(75)
@given(held=sources(), dtype=FLOATS, data=st.data())
def test_any_range_equals_converting_whole_tensors(
    worth: str, held: dict[str, Tensor], dtype: torch.dtype, data: st.DataObject
) -> None:
    change, expected = draw_change(data, held, ROWS | OTHERS)
    reader = ConvertedReader(MemoryReader(held), [change])
    for name, tensor in expected.items():
        span = data.draw(ranges(tensor.numel()))
        require_range(reader, name, tensor, span)
        if tensor.dtype.is_floating_point:
            require_cast(reader, name, tensor, span, dtype)
    require_equal(reader, expected)


@examples(50)
@given(held=sources(), data=st.data())
def test_what_is_traced_is_what_is_made(held: dict[str, Tensor], data: st.DataObject) -> None:
    """The runs of a conversion, put together, are its results: every step is traced correctly."""
    change, expected = draw_change(data, held, ROWS | OTHERS)
    runs = traced(change, held)
    for name, tensor in expected.items() if runs is not None else ():
        flat = {source: one.contiguous().view(-1) for source, one in held.items()}
        ends = [0, *itertools.accumulate(run.length for run in runs[name])]
        assert [run.start for run in runs[name]] == ends[:-1]
        parts = [raw(flat[run.source][run.at : run.at + run.length]) for run in runs[name]]
        assert b"".join(parts) == raw(tensor)


def grid(*shape: int, count: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {f"source {number}": random_bits(shape, dtype, number) for number in range(count)}


MOVES: dict[str, tuple[list[Step], dict[str, Tensor]]] = {
    "rename": ([], grid(4, 8, count=1)),
    "stack of vectors": ([stacked(0)], grid(8)),
    "stack": ([stacked(0)], grid(4, 8)),
    "stack rows alternately": ([stacked(1)], grid(4, 8)),
    "join": ([joined(0)], grid(4, 8)),
    "join dim 1 of three": ([joined(1)], grid(3, 4, 8)),
    "chunk": ([chunks(2, 0)], grid(4, 8, count=1)),
    "chunk unevenly": ([chunks(3, 0)], grid(7, 8, count=1)),
    "chunk dim 1 of three": ([chunks(2, 1)], grid(3, 4, 8, count=1)),
    "permute rows": ([regrouped(2, 0)], grid(12, 8)),
    "turn round": ([each(lambda t: t.flip(0))], grid(4, 8)),
    "repeat": ([each(lambda t: t.repeat_interleave(3, 0))], grid(4, 8)),
    "repeat by expansion": ([each(lambda t: t[:, None].expand(-1, 3, -1))], grid(4, 8)),
    "reshape": ([cut(2, 0)], grid(4, 8)),
    "merge": ([each(lambda t: t.flatten(0, 1))], grid(3, 4, 8)),
    "transpose dims before the last": ([each(lambda t: t.transpose(0, 1))], grid(3, 4, 8)),
    "experts to a stack and fused": ([stacked(0), chunks(2, 1), joined(1)], grid(4, 8, count=3)),
    "narrow": ([each(lambda t: t[1:3])], grid(4, 8)),
    "one column": ([stacked(0)], grid(4, 1)),
    "bf16": ([stacked(0)], grid(4, 8, dtype=torch.bfloat16)),
    "more columns than are probed": ([stacked(0)], grid(2, 35)),
}


@pytest.mark.parametrize("move", MOVES)
@examples(30)
@given(data=st.data())
def test_moved_rows_are_traced_and_cost_their_own_bytes(
    folder: Path, move: str, data: st.DataObject
) -> None:
    steps, held = MOVES[move]
    change = made_by(steps, list(held))
    assert traced(change, held) is not None
    base = in_file(folder, held)
    reader = ConvertedReader(base, [change])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converted, "WORTHWHILE", 0)
        for name, tensor in change.convert(held).items():
            start, stop = data.draw(ranges(tensor.numel()))
            before = base.bytes_read
            require_range(reader, name, tensor, (start, stop))
            assert base.bytes_read - before == 2 * (stop - start) * tensor.element_size()
    assert reader.bytes_read == base.bytes_read
    reader.close()


NO_MOVES: dict[str, tuple[list[Step], dict[str, Tensor]]] = {
    "join columns": ([joined(-1)], grid(4, 8)),
    "stack columns": ([stacked(-1)], grid(4, 8)),
    "join vectors": ([joined(0)], grid(8)),
    "chunk columns": ([chunks(2, -1)], grid(4, 8, count=1)),
    "transpose": ([each(lambda t: t.t())], grid(4, 8)),
    "transpose a square": ([each(lambda t: t.t())], grid(4, 4)),
    "transpose a square of the probe's size": ([each(lambda t: t.t())], grid(5, 5)),
    "transpose the other": ([each(lambda t: t.t())], grid(7, 7)),
    "flatten": ([each(lambda t: t.flatten())], grid(4, 8)),
    "narrow columns": ([each(lambda t: t[:, :5])], grid(4, 8)),
    "turn columns round": ([each(lambda t: t.flip(-1))], grid(4, 8)),
    "double": ([each(lambda t: 2 * t)], grid(4, 8)),
    "shift": ([each(lambda t: t + 1)], grid(4, 8)),
    "shift by a row of the probe": ([each(lambda t: t + 5)], grid(4, 8)),
    "shift by a row of the other": ([each(lambda t: t + 7)], grid(4, 8)),
    "shift by rows of both": ([each(lambda t: t + 35)], grid(40, 8)),
    "negative": ([each(lambda t: -t)], grid(4, 8)),
    "mean": ([lambda tensors: [sum(tensors) / 2]], grid(4, 8)),
    "difference": ([lambda tensors: [2 * tensors[1] - tensors[0]]], grid(4, 8)),
    "whole mean": ([lambda tensors: [sum(tensors) // 2]], grid(4, 8)),
    "cast": ([each(lambda t: t.to(torch.bfloat16))], grid(4, 8)),
    "dtypes that differ": ([stacked(0)], {**grid(4, 8), "b": torch.ones(4, 8).double()}),
    "no dimension": ([each(lambda t: t.clone())], grid(count=1)),
    "no element": ([stacked(0)], grid(0, 8)),
    **{
        f"regroup columns by {factor}": ([regrouped(factor, -1)], grid(3, 2 * factor))
        for factor in range(2, 12)
    },
    **{
        f"roll columns by {by}": ([each(lambda t, by=by: t.roll(by, -1))], grid(3, 12))
        for by in range(1, 11)
    },
}


@pytest.mark.parametrize("case", NO_MOVES)
def test_what_is_more_than_moving_rows_is_not_traced(case: str) -> None:
    steps, held = NO_MOVES[case]
    assert traced(made_by(steps, list(held)), held) is None


def test_long_runs_are_read_one_by_one_and_short_ones_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converted, "WORTHWHILE", WORTHWHILE)
    for rows, alone in ((1 << 13, True), (4, False)):
        held = grid(rows, 4)
        base = in_file(folder, held)
        reader = ConvertedReader(base, [made_by([stacked(0)], list(held))])
        size = rows * 4 * 4
        assert (size >= WORTHWHILE) is alone
        out = torch.empty(rows, dtype=torch.float32)
        reader.read_into("made 0", 4 * rows, out)
        assert raw(out) == raw(held["source 1"].view(-1)[:rows])
        assert base.bytes_read == (rows * 4 if alone else 2 * size)
        reader.close()


def test_results_of_one_change_are_converted_once(folder: Path) -> None:
    held = grid(6, 8, count=1)
    base = in_file(folder, held)
    reader = ConvertedReader(base, [made_by([chunks(4, -1)], list(held))])
    require_equal(reader, made_by([chunks(4, -1)], list(held)).convert(held))
    assert base.bytes_read == held["source 0"].nbytes
    reader.close()


def test_changes_and_names_that_cannot_be() -> None:
    held = MemoryReader(grid(2, 2))
    changes = [renamed("source 0", "x"), renamed("source 1", "x")]
    with pytest.raises(StageError, match="both source 0 and source 1 become x"):
        ConvertedReader(held, changes)
    uneven = MemoryReader({"a": torch.ones(2, 3), "b": torch.ones(3, 3)})
    with pytest.raises(StageError, match="a, b cannot be converted: "):
        ConvertedReader(uneven, [made_by([stacked(0)], ["a", "b"])])
    reader = ConvertedReader(held, changes[:1])
    assert list(reader.names()) == ["x"]
    for ask in (reader.spec, reader.read, lambda name: list(reader.chunks(name, 0, 1))):
        with pytest.raises(StageError, match="no tensor named source 0"):
            ask("source 0")


# Real architectures.


@pytest.fixture(scope="module", params=["mixtral", "llama", "phi3", "gpt2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def outline(family: str) -> Any:
    with init_empty_weights(include_buffers=False):
        return random_source(FAMILIES[family], Path()).build()


def saved(family: str, folder: Path) -> tuple[dict[str, Tensor], Path]:
    """Return a model's state dict and the file that transformers writes of it."""
    model = filled(random_source(FAMILIES[family], Path()))
    model.save_pretrained(folder / family)
    return model.state_dict(), folder / family / "model.safetensors"


def test_a_file_becomes_the_module_and_the_module_the_file(
    family: str, worth: str, folder: Path
) -> None:
    state, file = saved(family, folder)
    model, stored = outline(family), SafetensorsReader([file])

    def as_file(base: TensorReader) -> ConvertedReader:
        return ConvertedReader(base, compat.changes_on_save(model, base.names()))

    def as_module(base: TensorReader) -> ConvertedReader:
        return ConvertedReader(base, compat.changes_on_load(model, base.names()))

    contents = {name: stored.read(name) for name in stored.names()}
    tied = state.keys() - as_module(stored).names()
    state = {name: tensor for name, tensor in state.items() if name not in tied}
    assert tied <= {"lm_head.weight"}
    require_equal(as_module(stored), state)
    require_equal(as_file(MemoryReader(state)), contents)
    require_equal(as_file(as_module(stored)), contents)
    require_equal(as_module(as_file(MemoryReader(state))), state)
    stored.close()


def test_the_experts_of_a_mixtral_are_traced_both_ways(folder: Path) -> None:
    state, file = saved("mixtral", folder)
    model, stored = outline("mixtral"), SafetensorsReader([file])
    contents = {name: stored.read(name) for name in stored.names()}
    loads = [c for c in compat.changes_on_load(model, contents) if len(c.sources) > 1]
    saves = compat.changes_on_save(model, state)
    fused, down = (len(c.sources) for c in loads[:2])
    assert (len(loads), fused, down) == (4, 6, 3)  # for each of two blocks
    for changes, held in ((loads, contents), (saves, state)):
        for change in changes:
            assert traced(change, {name: held[name] for name in change.sources}) is not None
    stored.close()
