"""Readers of files that others may have made: whatever is in them, they end with an error for
people, in time, within their folder and a bound of memory."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from pipeline.checkpoint.formats import Reading
from pipeline.checkpoint.manifest import Manifest, _framed
from pipeline.execution.journal import Journal
from pipeline.launch.exchange import _BEATS
from pipeline.recipe import read_recipe
from stages.formats.formats import Canonical, Dcp, DeepSpeed
from stages.model.files import weight_files
from stages.weights.files import SafetensorsReader
from tests.fuzz.hostile import Changes, bounded, changed_archive
from tests.support.formats import tiny_native, tiny_universal
from tests.support.sweep import save
from tests.support.tier import examples
from tests.support.tiny_store import Tiny

ROOT = Path(__file__).parents[2]
WEIGHTS = "model-00001-of-00001.safetensors"


def many(quick: int) -> Any:
    """Return the settings of a fuzz test."""
    return settings(examples(quick), suppress_health_check=list(HealthCheck), deadline=None)


def read_all(source: Any) -> None:
    """Read every tensor of a source."""
    for key, entry in source.tensors.items():
        for _ in source.read(key, 0, entry.numel):
            pass


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a valid example of every format."""
    folder = tmp_path_factory.mktemp("valid")
    for name, make in (("native", tiny_native), ("universal", tiny_universal)):
        (folder / name).mkdir()
        make(folder / name)
    flat = {
        "state.w.exp_avg": torch.ones(4), "state.w.exp_avg_sq": torch.ones(4),
        "state.w.step": torch.tensor(3.0), "param_groups.w.lr": 1e-3,
        "param_groups.w.betas": (0.9, 0.99),
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_dcp({"model": {"w": torch.ones(4)}, "optimizer": flat}, checkpoint_id=folder / "dcp",
                 no_dist=True)  # fmt: skip
    tiny = Tiny(str(folder / "store"))
    assert save(tiny, 1).problems == ["", ""]
    model = folder / "model"
    model.mkdir()
    save_file(
        {"a": torch.ones(4, 3), "b": torch.ones(2)}, model / "model-00001-of-00001.safetensors"
    )
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}, "metadata": {}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    journal = Journal(folder / "journal.jsonl")
    journal.write("run started", procs=2)
    journal.write("slot finished", slot="a", use="b", digest="c", record={"x": [1, 2]})
    return folder


def fuzzed(
    valid: Path, part: str, data: Any, read: Callable[[Path], None], *, archives: bool = False
) -> None:
    """Change a file of a valid example, and read it."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch, part)
        if (valid / part).is_dir():
            shutil.copytree(valid / part, place)
            files = sorted(path for path in place.rglob("*") if path.is_file())
            file = data.draw(st.sampled_from(files))
        else:
            place.parent.mkdir(exist_ok=True)
            shutil.copy(valid / part, place)
            file = place
        changes = Changes(data)
        content = file.read_bytes()
        file.write_bytes(changed_archive(content, changes) if archives else changes(content))
        with bounded(Path(scratch)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(place)


@many(40)
@given(st.data())
def test_deepspeed_native(valid: Path, data: Any) -> None:
    fuzzed(valid, "native", data, lambda p: read_all(DeepSpeed().open(p, Reading())), archives=True)


@many(40)
@given(st.data())
def test_deepspeed_universal(valid: Path, data: Any) -> None:
    def read(place: Path) -> None:
        read_all(DeepSpeed().open(place, Reading()))

    fuzzed(valid, "universal", data, read, archives=True)


@many(40)
@given(st.data())
def test_dcp(valid: Path, data: Any) -> None:
    fuzzed(valid, "dcp", data, lambda place: read_all(Dcp().open(place, Reading())))


@many(40)
@given(st.data())
def test_canonical(valid: Path, data: Any) -> None:
    part = "store/step-00000001"
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch, "step-00000001")
        shutil.copytree(valid / part, place)
        file = data.draw(st.sampled_from(sorted(p for p in place.rglob("*") if p.is_file())))
        content = Changes(data)(file.read_bytes())
        if file.name.startswith("manifest") and data.draw(st.booleans()):
            content = _framed(content[content.find(b",") : -2] if b"," in content else content)
        file.write_bytes(content)
        with bounded(Path(scratch)):
            read_all(Canonical().open(place, Reading()))


@many(60)
@given(st.data())
def test_a_manifest_with_a_right_checksum(valid: Path, data: Any) -> None:
    (file,) = (valid / "store" / "step-00000001").glob("manifest*")
    whole = file.read_bytes()
    head = _framed(b"").index(b",")
    body = whole[head : head + len(whole) - len(_framed(b""))]
    assert _framed(body) == whole
    with bounded(valid):
        Manifest.load(_framed(Changes(data)(body)), "here")


@many(60)
@given(st.data())
def test_safetensors(valid: Path, data: Any) -> None:
    def read(place: Path) -> None:
        reader = SafetensorsReader([place])
        for name in reader.names():
            spec = reader.spec(name)
            for _ in reader.chunks(name, 0, spec.numel):
                pass
        reader.close()

    fuzzed(valid, f"model/{WEIGHTS}", data, read)


@many(60)
@given(st.data())
def test_an_index(valid: Path, data: Any) -> None:
    def read(place: Path) -> None:
        for file in weight_files(place.parent, None):
            assert file.resolve().is_relative_to(place.parent.resolve())

    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(valid / "model", scratch, dirs_exist_ok=True)
        file = Path(scratch, "model.safetensors.index.json")
        file.write_bytes(Changes(data)(file.read_bytes()))
        with bounded(Path(scratch)):
            read(file)


@many(60)
@given(st.data())
def test_a_journal(valid: Path, data: Any) -> None:
    def read(place: Path) -> None:
        journal = Journal(place)
        journal.state()

    fuzzed(valid, "journal.jsonl", data, read)


SNIPPETS = (
    "&a [*a]", "!!python/object/apply:os.system [x]", "<<: *b", "${oc.env:HOME}", "- " * 200,
    "{" * 300, "${stages.train.steps}", "? [a]\n: b", "extends: ../../etc/passwd", "\x00", "\ufeff",
    "a: &x {b: *x}", "1e999", ".inf", "'", '"', "|", ">-", "%YAML 1.1", "---",
)  # fmt: skip


@many(80)
@given(st.data())
def test_a_recipe(data: Any) -> None:
    """Reading returns problems and raises nothing."""
    text = (ROOT / "recipes" / "quickstart.yaml").read_bytes()
    content = Changes(data)(text)
    for _ in range(data.draw(st.integers(0, 2))):
        lines = content.split(b"\n")
        lines.insert(
            data.draw(st.integers(0, len(lines))), data.draw(st.sampled_from(SNIPPETS)).encode()
        )
        content = b"\n".join(lines)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "recipe.yaml")
        file.write_bytes(content)
        with bounded(Path(scratch), may_leave=True):  # `extends` names any file
            read_recipe(file)


@many(60)
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_a_message_of_a_node(content: bytes) -> None:
    with contextlib.suppress(pydantic.ValidationError):
        _BEATS.validate_json(content)
