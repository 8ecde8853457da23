"""A manifest is read back unchanged, and its ranges must cover everything."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.division import CoverageError, Run, require_cover
from pipeline.checkpoint.manifest import (
    Damaged,
    DataFile,
    Manifest,
    RankShare,
    TensorEntry,
)
from pipeline.checkpoint.safetensors_format import ITEM_BYTES
from pipeline.checkpoint.writer_protocol import SaveRequest
from pipeline.contracts.engine import EngineState, LossScale, ParameterGroup
from tests.support.tiny_store import setups

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats())
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
COUNTS = st.integers(0, 2**64 - 1)
FACTS = st.dictionaries(TEXT, PLAIN, max_size=4)
STATES = st.fixed_dictionaries(
    {
        "aliases": st.dictionaries(TEXT, TEXT, max_size=3),
        "frozen": st.lists(TEXT, max_size=3),
        "groups": st.lists(
            st.fixed_dictionaries({"settings": FACTS, "parameters": st.lists(TEXT, max_size=3)}),
            max_size=3,
        ),
        "updates": st.dictionaries(TEXT, COUNTS, max_size=3),
        "moments": st.lists(TEXT, max_size=3),
        "loss_scale": st.one_of(
            st.none(),
            st.fixed_dictionaries({"scale": st.floats(), "good_steps": st.integers(0, 9)}),
        ),
    }
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Draw manifests of tensors in sequence in one file, each in one piece or two."""
    tensors, runs, offset = [], [], 4096
    for key in draw(st.lists(TEXT, unique=True, max_size=4)):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        tensor = TensorEntry(key=key, dtype=draw(st.sampled_from(sorted(ITEM_BYTES))), shape=shape)
        cut = draw(st.integers(0, tensor.numel))
        edges = ((0, cut), (cut, tensor.numel))
        runs.append([Run(start, stop, stop - start, 0) for start, stop in edges if start < stop])
        offset += tensor.numel * tensor.itemsize
        tensors.append(tensor)
    file = DataFile(name="rank-00000.safetensors", size=offset, data_start=4096, header=7)
    return Manifest(
        step=draw(st.integers(0, 10**18)),
        written="2026-01-01T00:00:00+00:00",
        world_size=1,
        writer=draw(FACTS),
        progress=draw(FACTS),
        state=draw(STATES),
        tensors=tensors,
        runs=runs,
        files=[file],
        parts=[RankShare(sums="rank-00000.sums", digest=draw(COUNTS))],
    )


@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    data = manifest.dump()
    again = Manifest.load(data, "here")
    assert same(again.model_dump(), manifest.model_dump())
    assert again.dump() == data


@given(manifests(), st.data())
def test_no_byte_of_it_can_change(manifest: Manifest, data: st.DataObject) -> None:
    bytes_ = bytearray(manifest.dump())
    place = data.draw(st.integers(0, len(bytes_) - 1))
    bytes_[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Damaged, match=r"^here: its checksum is wrong"):
        Manifest.load(bytes(bytes_), "here")


@given(manifests(), st.data())
def test_no_part_of_it_is_enough(manifest: Manifest, data: st.DataObject) -> None:
    bytes_ = manifest.dump()
    length = data.draw(st.integers(0, len(bytes_) - 1))
    with pytest.raises(Damaged):
        Manifest.load(bytes_[:length], "here")


GOLDEN = {
    name: Path(__file__).with_name(f"golden_manifest_{name}.json") for name in ("sharded", "full")
}
MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = EngineState(
    shapes={"a": (3, 50), "b": (90, 100)},
    aliases={"head": "a"},
    frozen=("b",),
    groups=[
        ParameterGroup(
            settings={"lr": 0.1, "betas": (0.9, 0.99), "fused": None},
            parameters=["a"],
            moments=MOMENTS,
        ),
        ParameterGroup(
            settings={"lr": 1e-5, "weight_decay": math.inf}, parameters=(), moments=MOMENTS
        ),
    ],
    updates={"a": 7},
    loss_scale=LossScale(scale=65536.0, good_steps=3),
    averages=("ema",),
)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_are_those_of_earlier_releases(name: str) -> None:
    """The way is from an engine's state through the message to the writer."""
    template = setups("/nowhere", name)[0][0].template
    assert template is not None
    metrics = {"loss": 1.5, "eval_loss": math.nan}
    progress = {"step": 7, "metrics": metrics, "best": {}}
    facts = {"step": 7, "progress": progress, "state": STATE}
    request = SaveRequest(name="step-00000007", identity="x", began=0.0, facts=facts)
    received = SaveRequest.model_validate_json(request.model_dump_json())
    made = template.fill(received.facts, "x/", [1, 2**64 - 1])
    dated = made.model_copy(update={"written": "2026-01-01T00:00:00+00:00"})
    assert dated.dump() == GOLDEN[name].read_bytes()
    again = Manifest.load(GOLDEN[name].read_bytes(), "here")
    assert again.shapes() == STATE.shapes
    restored = dataclasses.replace(again.state, shapes=again.shapes())
    assert same(dataclasses.asdict(restored), dataclasses.asdict(STATE))


KINDS = st.lists(st.sampled_from(["exp_avg", "exp_avg_sq", "momentum_buffer"]), unique=True)


@given(st.lists(KINDS, max_size=3))
def test_each_group_keeps_its_kinds_of_state(kinds: list[list[str]]) -> None:
    """Groups that have the same are written as earlier releases did."""
    groups = [
        ParameterGroup(settings={}, parameters=[f"p{number}"], moments=own)
        for number, own in enumerate(kinds)
    ]
    state = dataclasses.replace(STATE, shapes={}, frozen=[], averages=[], groups=groups)
    text = pydantic.TypeAdapter(EngineState).dump_json(state)
    written = json.loads(text)
    alike = len({tuple(own) for own in kinds}) <= 1
    assert ("moments" in written) == alike
    assert [("moments" in group) for group in written["groups"]] == [not alike] * len(kinds)
    read = pydantic.TypeAdapter(EngineState).validate_json(text)
    assert read == state
    assert read.moments() == {f"p{number}": tuple(own) for number, own in enumerate(kinds)}


def same(one: Any, other: Any) -> bool:
    """Compare with lists taken for tuples, and not-a-number equal to itself."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return type(one) is type(other) and bool(one == other)


@st.composite
def covers(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    edges = sorted({0, *draw(st.sets(st.integers(0, 60), max_size=8))})
    ranges = list(itertools.pairwise(edges))
    return draw(st.permutations(ranges)), edges[-1]


@given(covers())
def test_a_cover_is_accepted_and_without_any_range_it_is_not(
    cover: tuple[list[tuple[int, int]], int],
) -> None:
    ranges, total = cover
    require_cover(ranges, total)
    for place in range(len(ranges)):
        with pytest.raises(CoverageError):
            require_cover(ranges[:place] + ranges[place + 1 :], total)
        with pytest.raises(CoverageError, match="are there twice"):
            require_cover([*ranges, ranges[place]], total)
    with pytest.raises(CoverageError, match="ends at element"):
        require_cover(ranges, total + 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.integers(0, 9))
def test_whatever_is_accepted_has_each_element_once(
    ranges: list[tuple[int, int]], total: int
) -> None:
    ranges = [(start, stop) for start, stop in ranges if start < stop]
    elements = sorted(element for start, stop in ranges for element in range(start, stop))
    try:
        require_cover(ranges, total)
    except CoverageError:
        assert elements != list(range(total))
    else:
        assert elements == list(range(total))
