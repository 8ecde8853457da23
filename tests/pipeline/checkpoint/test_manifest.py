"""A manifest is read back unchanged, what was edited or is damaged is refused, and those of earlier
releases are read: version 1 lists every piece, versions 2 and 3 divide tensors by rules."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.division import Division, Piece
from pipeline.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    Damaged,
    DataFile,
    Manifest,
    RankShare,
    TensorEntry,
)
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.store import LocalStore
from pipeline.checkpoint.writer import SaveRequest
from pipeline.contracts.engine import EngineState, LossScale, ParameterGroup
from pipeline.errors import CheckpointError
from tests.support.tier import times
from tests.support.tiny_store import Tiny, digests, read_digests, setups, write

NAME = "step-00000001"

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats())
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
COUNTS = st.integers(0, 2**64 - 1)
FACTS = st.dictionaries(TEXT, PLAIN, max_size=4)
NAMES = st.lists(TEXT, max_size=3)
GROUPS = st.fixed_dictionaries({"settings": FACTS, "parameters": NAMES})
SCALES = st.fixed_dictionaries({"scale": st.floats(), "good_steps": st.integers(0, 9)})
STATES = st.fixed_dictionaries(
    {
        "aliases": st.dictionaries(TEXT, TEXT, max_size=3), "frozen": NAMES,
        "groups": st.lists(GROUPS, max_size=3), "moments": NAMES,
        "updates": st.dictionaries(TEXT, COUNTS, max_size=3),
        "loss_scale": st.one_of(st.none(), SCALES),
    }
)  # fmt: skip


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Draw manifests of tensors in sequence in one file, each in one piece or two."""
    tensors, pieces, offset = [], list[list[Piece]](), 4096
    for key in draw(st.lists(TEXT, unique=True, max_size=4)):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        tensor = TensorEntry(key=key, dtype=draw(st.sampled_from(sorted(ITEM_BYTES))), shape=shape)
        cut = draw(st.integers(0, tensor.numel))
        edges = ((0, cut), (cut, tensor.numel))
        pieces.append([Piece(0, start, stop) for start, stop in edges if start < stop])
        offset += tensor.numel * tensor.itemsize
        tensors.append(tensor)
    file = DataFile(name="rank-00000.safetensors", size=offset, data_start=4096, header=7)
    return Manifest(
        step=draw(st.integers(0, 10**18)), written="2026-01-01T00:00:00+00:00", world_size=1,
        writer=draw(FACTS), progress=draw(FACTS), state=draw(STATES), tensors=tensors,
        division=Division.of(pieces), files=[file],
        parts=[RankShare(sums="rank-00000.sums", digest=draw(COUNTS))],
    )  # fmt: skip


@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    data = manifest.dump()
    again = Manifest.load(data, "here")
    assert same(again.model_dump(), manifest.model_dump())
    assert again.dump() == data


@given(manifests(), st.data())
def test_no_byte_of_it_can_change_and_no_part_is_enough(
    manifest: Manifest, data: st.DataObject
) -> None:
    bytes_ = bytearray(manifest.dump())
    place = data.draw(st.integers(0, len(bytes_) - 1))
    with pytest.raises(Damaged):
        Manifest.load(bytes(bytes_[:place]), "here")
    bytes_[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Damaged, match=r"^here: its checksum is wrong"):
        Manifest.load(bytes(bytes_), "here")


HERE = Path(__file__).parent
MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS = {"lr": 0.1, "betas": (0.9, 0.99), "fused": None}
OTHERS = {"lr": 1e-5, "weight_decay": math.inf}
STATE = EngineState(
    shapes={"a": (3, 50), "b": (90, 100)}, aliases={"head": "a"}, frozen=("b",),
    groups=[
        ParameterGroup(settings=SETTINGS, parameters=["a"], moments=MOMENTS),
        ParameterGroup(settings=OTHERS, parameters=(), moments=MOMENTS),
    ],
    updates={"a": 7}, loss_scale=LossScale(scale=65536.0, good_steps=3), averages=("ema",),
)  # fmt: skip


@pytest.mark.parametrize("name", ["sharded", "full"])
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
    golden = (HERE / f"golden_manifest_{name}_4.json").read_bytes()
    assert dated.dump() == golden
    earlier = (HERE / f"golden_manifest_{name}.json").read_bytes()
    for data in (golden, earlier):
        again = Manifest.load(data, "here")
        keys = [(*entry.key.partition("/"), entry.shape) for entry in again.tensors]
        shapes = {name: shape for kind, _, name, shape in keys if kind == "weight"}
        assert shapes == STATE.shapes
        restored = dataclasses.replace(again.state, shapes=shapes)
        assert same(dataclasses.asdict(restored), dataclasses.asdict(STATE))
        assert again.dump() == data
    assert Manifest.load(earlier, "here").divided == template.division


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


Change = Callable[[dict[str, Any]], object]
Content = dict[str, Any]
FORMS = ("sharded", "full")
DIGESTS = {
    1: {
        "weight/a": "adbf4e88c53c1ff1ecc151345f6fb4299ac39ef7193c589d742a20870f942b8a",
        "random/00000/torch": "c5dcc7b20486c22960ed7fa328535a604e955fa8ef07a468345a8d7b764f68ae",
        "random/00001/torch": "d7d60b57d1283a8354e5027033e40cd595852182ea5e852c454bd09f9a76ceed",
    },
    2: {
        "weight/a": "d0ac9af842da374cfcd5a99c28f4890b50e4954f960d1ba8b729c21e0f9d6d24",
        "random/00000/torch": "257c82419a565063b859089a82c32cba57bb714f20a9406238cad2525284ed51",
        "random/00001/torch": "405334cf5eeb3db03c4be33b311e1623f3ebfd0b9f91c48bcd082aa7464cc584",
    },
}  # fmt: skip
DIGESTS[3] = DIGESTS[2]
SAME = {
    "weight/b": "67c990332226eb416e0f15c7737c0f079fc3f8fca800373e84303dee3316a03d",
    "exp_avg/b": "2709c675cbb3d4d4207e1d6ba3ec0b08f7fdde9b9087d4e9d597ef84e2dff14b",
}
IDENTITIES = {
    "1 sharded": "495837ea5db453390af1e1cde32c8b91e6ef4d50fda5c1bbdf95321d70e8bd86",
    "1 full": "e28ee8660e7fa07d9df5c291a77016a8acc641a5f0ed7a62540e45d975abc0cf",
    "2 sharded": "fb5a79ec384e03ac1f621cadddc1a2fb11675e5aef4c5ecf8c67ea73a7e4068a",
    "2 full": "f52075b8cf5dd75d132fc735f4ffe1751698fb5dac17de259009134e5a90c07a",
    "3 sharded": "9056afa47ec233b7e55963c7cd5ebcb17f5ec8514ba54d8e82be9790ef13c15b",
    "3 full": "58f978e02245d775de9f8ea6c7f9c0eaa7a79ebd9739353cec2b45b86ccb38c2",
}
"""`Manifest.digest` of the stored checkpoints: runs have recorded such."""


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a store with a checkpoint of two ranks, given its version and arrangement."""
    version, _, form = request.param.partition(" ")
    if version == "4":
        assert write(Tiny(str(tmp_path), form), 1).problem == ""
        return tmp_path
    with tarfile.open(HERE / f"version_{version}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / form


def of_versions(*versions: int, forms: Sequence[str] = FORMS) -> pytest.MarkDecorator:
    names = [f"{version} {form}" for version in versions for form in forms]
    return pytest.mark.parametrize("root", names, indirect=True)


@of_versions(1, 2, 3)
def test_checkpoints_of_earlier_releases(root: Path, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["root"]
    wanted = SAME | DIGESTS[int(name[0])]
    assert read_digests(LocalStore(root), NAME) == wanted
    path = root / NAME / MANIFEST
    data = path.read_bytes()
    manifest = Manifest.load(data, "here")
    assert manifest.digest() == IDENTITIES[name]
    assert manifest.version == 1 or manifest.dump() == data
    # the progress of one may be replaced
    path.write_bytes(manifest.model_copy(update={"progress": {"step": 1, "more": 2}}).dump())
    assert CheckpointReader(LocalStore(root), NAME).progress == {"step": 1, "more": 2}
    assert read_digests(LocalStore(root), NAME) == wanted
    for file in sorted((root / NAME).iterdir()):
        content = bytearray(file.read_bytes())
        for place in range(3, len(content), 197):
            content[place] ^= 1
            file.write_bytes(content)
            with pytest.raises(CheckpointError):
                read_digests(LocalStore(root), NAME)
            content[place] ^= 1
        file.write_bytes(content)


def edit(root: Path, change: Change, *, sign: bool = True) -> None:
    """Change the manifest and correct its checksum."""
    path = root / NAME / MANIFEST
    data = json.loads(path.read_bytes())
    change(data["checkpoint"])
    body = json.dumps(data["checkpoint"])
    digest = hashlib.sha256(body.encode()).hexdigest() if sign else data["sha256"]
    path.write_text(f'{{"checkpoint": {body}, "sha256": "{digest}"}}\n')


def read_each(root: Path) -> None:
    """Read each tensor, without a look at anything else."""
    opened = CheckpointReader(LocalStore(root), NAME)
    for key, tensor in opened.tensors.items():
        opened.read_into(key, 0, memoryview(bytearray(tensor.nbytes)))


def assert_refused(root: Path, change: Change, problem: str) -> None:
    edit(root, change)
    for read in (read_each, lambda root: read_digests(LocalStore(root), NAME)):
        with pytest.raises(CheckpointError, match=problem) as told:
            read(root)
        assert str(root / NAME) in str(told.value)


def number_of(manifest: Content, key: str) -> int:
    return [tensor["key"] for tensor in manifest["tensors"]].index(key)


def layout_of(manifest: Content, key: str) -> list[list[int]]:
    """Return the pieces of a tensor: rank, start, stop, and of columns stride and count."""
    division = manifest["division"]
    found: list[list[int]] = division["layouts"][division["tensors"][number_of(manifest, key)]]
    return found


def change_piece(key: str, field: int, value: int) -> Change:
    return lambda manifest: layout_of(manifest, key)[0].__setitem__(field, value)


def change_tensor(field: str, value: Any) -> Change:
    return lambda manifest: manifest["tensors"][0].update({field: value})


def change_file(field: str, value: Any) -> Change:
    return lambda manifest: manifest["files"][0].update({field: value})


def forget_tensor(manifest: Content) -> None:
    """Remove the last tensor; the rest stays consistent."""
    del manifest["tensors"][-1], manifest["division"]["tensors"][-1]


def repeat_tensor(manifest: Content) -> None:
    manifest["tensors"].append(dict(manifest["tensors"][0]))
    manifest["division"]["tensors"].append(manifest["division"]["tensors"][0])


def swap_sums(manifest: Content) -> None:
    first, second = manifest["parts"]
    first["sums"], second["sums"] = second["sums"], first["sums"]


EDITS: dict[str, tuple[Change, str]] = {
    "smaller shape": (change_tensor("shape", [3, 49]), "weight/a: ends at element 150 of 147"),
    "larger shape": (change_tensor("shape", [3, 51]), "weight/a: ends at element 150 of 153"),
    "unknown dtype": (change_tensor("dtype", "F33"), "weight/a has the unknown dtype F33"),
    "tensor forgotten": (forget_tensor, "do not fill it"),
    "tensor twice": (repeat_tensor, "two entries for weight/a"),
    "piece dropped": (lambda m: layout_of(m, "weight/b").pop(), "weight/b: ends at element 4501"),
    "piece twice": (
        lambda m: layout_of(m, "weight/b").append(layout_of(m, "weight/b")[0]),
        "weight/b: elements .* are there twice",
    ),
    "piece shorter": (
        change_piece("weight/b", 2, 4500), "weight/b: elements 4500 to 4501 are missing"
    ),
    "piece of nothing": (
        change_piece("weight/b", 2, 0), "weight/b: has a part without elements from 0 on"
    ),
    "piece of another rank": (
        change_piece("weight/b", 0, 1), r"do not fill it|rank-0000[01]\.sums"
    ),
    "piece of no rank": (
        change_piece("weight/b", 0, 2), "weight/b: divided among ranks that do not exist"
    ),
    "negative piece": (change_piece("weight/b", 1, -1), "written by another version: division"),
    "rows": (
        lambda m: layout_of(m, "weight/b")[0].extend([0, 2]), "weight/b: has a part without"
    ),
    "no layouts": (lambda m: m["division"].update(layouts=[]), "weight/a: has an unknown layout"),
    "no tensors": (
        lambda m: m["division"].update(tensors=[]), "does not say which rank has which tensor"
    ),
    "no division": (lambda m: m.pop("division"), "does not say which rank has which tensor"),
    "rules": (lambda m: m.update(runs=[[]] * 5), "in a way that its version does not have"),
    "pieces": (
        lambda m: m["parts"][0].update(pieces=[[0, 0, 4096, 0, 1]]),
        "in a way that its version does not have",
    ),
    "tensor in no file": (change_tensor("file", 9), "weight/a: lies in an unknown file"),
    "tensor in another file": (change_tensor("file", 1), "do not fill it"),
    "file larger": (change_file("size", 10**15), "do not fill it|instead of 1000000000000000"),
    "header larger": (change_file("data_start", 10**15), "longer than the file"),
    "another header": (change_file("header", 1), "its header is damaged"),
    "sums swapped": (swap_sums, "rank-0000[01].sums"),
    "another step": (lambda m: m.update(step=2), "of step 2, in a folder that was renamed"),
    "another version": (lambda m: m.update(version=5), "written by another version: version"),
    "more fields": (lambda m: m.update(more=2), "written by another version: more"),
}  # fmt: skip
COLUMN_EDITS: dict[str, tuple[Change, str]] = {
    "wider rows": (
        change_piece("weight/b", 3, 101), "is divided by columns of rows of different lengths"
    ),
    "columns missing": (change_piece("exp_avg/b", 2, 29), "exp_avg/b: element 29 is missing"),
    "columns twice": (change_piece("exp_avg/b", 2, 31), "exp_avg/b: element 30 is there twice"),
    "another column": (change_piece("exp_avg/b", 1, 1), "exp_avg/b: element 0 is missing"),
    "a longer field list": (lambda m: layout_of(m, "weight/b")[0].append(0), "another version: "),
}  # fmt: skip


@of_versions(4)
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_manifest(root: Path, name: str) -> None:
    assert_refused(root, *EDITS[name])


@of_versions(4, forms=["full columns"])
@pytest.mark.parametrize("name", COLUMN_EDITS)
def test_edited_columns(root: Path, name: str) -> None:
    assert_refused(root, *COLUMN_EDITS[name])


@of_versions(4, forms=["sharded"])
@pytest.mark.parametrize(
    "bad",
    ["/etc/passwd", "../x", "a/../../x", "a/..", ".", "", "a//b", "a\\b", "a\0b", ".hidden"],
)
def test_names_outside_of_the_folder(root: Path, bad: str) -> None:
    good = (root / NAME / MANIFEST).read_bytes()
    assert_refused(root, change_file("name", bad), "names a file outside of its folder")
    (root / NAME / MANIFEST).write_bytes(good)
    change: Change = lambda manifest: manifest["parts"][0].update(sums=bad)  # noqa: E731
    assert_refused(root, change, "names a file outside of its folder")


@of_versions(4)
def test_the_checksum_of_an_edited_manifest(root: Path) -> None:
    """The edits above are refused for their change, not for being edits."""
    edit(root, lambda manifest: None)
    assert read_digests(LocalStore(root), NAME) == digests(1)
    edit(root, lambda manifest: manifest.update(step=2), sign=False)
    with pytest.raises(Damaged, match=f"{root / NAME / MANIFEST}: its checksum is wrong"):
        read_digests(LocalStore(root), NAME)


def listed(manifest: Content, key: str) -> list[list[int]]:
    """Return a tensor's pieces in version 1: tensor, file, offset, start, stop."""
    number = number_of(manifest, key)
    return [p for part in manifest["parts"] for p in part["pieces"] if p[0] == number]


def change_listed(key: str, field: int, by: int) -> Change:
    def change(manifest: Content) -> None:
        listed(manifest, key)[0][field] += by

    return change


LISTED_EDITS: dict[str, tuple[Change, str]] = {
    "dropped": (lambda m: m["parts"][1]["pieces"].pop(0), "weight/b: ends at element 45 of 90"),
    "moved": (change_listed("weight/b", 2, 4), "weight/b"),
    "of another file": (change_listed("weight/b", 1, 1), "weight/b"),
    "of no file": (change_listed("weight/b", 1, 9), "unknown tensor or file"),
    "of no tensor": (change_listed("weight/b", 0, 9), "unknown tensor or file"),
    "in the header": (change_listed("weight/a", 2, -4096), "weight/a"),
}


@of_versions(1)
@pytest.mark.parametrize("name", LISTED_EDITS)
def test_an_edited_piece_of_version_1(root: Path, name: str) -> None:
    change, problem = LISTED_EDITS[name]
    edit(root, change)
    with pytest.raises(CheckpointError, match=problem):
        read_digests(LocalStore(root), NAME)


def runs_of(manifest: Content, key: str) -> list[list[int]]:
    found: list[list[int]] = manifest["runs"][number_of(manifest, key)]
    return found


def change_run(key: str, field: int, value: int, number: int = 0) -> Change:
    """Change a number of a run: start, stop, length, rank, step, cuts, apart, width, bands, across;
    the last three may have been left out."""

    def change(manifest: Content) -> None:
        run = runs_of(manifest, key)[number]
        run += [0, 1, 0][len(run) - 7 :]
        run[field] = value

    return change


RUN_EDITS: dict[str, tuple[Change, str]] = {
    "other rows": (change_run("weight/b", 7, 9), "weight/b: is divided by columns of other rows"),
    "no rows": (change_run("weight/b", 7, 0), "weight/b: divided among ranks that do not exist"),
    "no bands": (change_run("weight/b", 8, 0), "written by another version: runs"),
    "bands on one rank": (change_run("weight/b", 9, 0), "weight/b: divided among ranks"),
    "parts of half rows": (change_run("weight/b", 2, 45), "weight/b: divided among ranks"),
    "longer than all": (change_run("weight/b", 2, 10**30), "weight/b: divided among ranks"),
    "of no rank": (change_run("weight/b", 3, 2), "weight/b: divided among ranks that do not"),
    "cut": (change_run("weight/b", 5, 2), "weight/b: divided among ranks"),
    "a column missing": (change_run("exp_avg/b", 1, 32), "exp_avg/b: element 2 is missing"),
    "a column twice": (change_run("exp_avg/b", 1, 34), "exp_avg/b: element 3 is there twice"),
    "no columns": (change_run("exp_avg/b", 0, 5), "exp_avg/b: has a part without columns"),
    "a version without columns": (lambda m: m.update(version=2), "its version does not have"),
    "none": (lambda m: m.update(runs=[]), "does not say which rank has which tensor"),
}  # fmt: skip


@of_versions(3, forms=["sharded"])
@pytest.mark.parametrize("name", RUN_EDITS)
def test_an_edited_rule(root: Path, name: str) -> None:
    assert_refused(root, *RUN_EDITS[name])


@of_versions(3)
def test_no_number_of_a_rule_leads_elsewhere(root: Path) -> None:
    """A changed rule is refused, unless it says the same: a range is one in rows of any length."""
    chance, refused = random.Random(0), 0
    good = (root / NAME / MANIFEST).read_bytes()
    turns = times(quick=60, full=3000)
    for _ in range(turns):
        key, field = chance.choice(("weight/b", "exp_avg/b")), chance.randrange(10)
        value = chance.choice([0, 1, 2, 3, 5, 9, 10, 11, 20, 33, 40, 45, 90, 10**30])
        number = chance.randrange(len(runs_of(json.loads(good)["checkpoint"], key)))
        (root / NAME / MANIFEST).write_bytes(good)
        edit(root, change_run(key, field, value, number))
        try:
            assert read_digests(LocalStore(root), NAME) == SAME | DIGESTS[3], (key, field, value)
        except CheckpointError:
            refused += 1
    assert refused > turns * 0.8
