"""Readers of files that others may have made: whatever is in them, they end with an error for
people, in time, within their folder and a bound of memory."""

from __future__ import annotations

import contextlib
import hashlib
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
from pipeline.checkpoint.manifest import _FRAME, Manifest
from pipeline.execution.journal import Journal
from pipeline.launch.nodes import _STATE
from pipeline.recipe import read_recipe
from stages.formats.formats import Canonical, Dcp, DeepSpeed
from stages.model.files import weight_files
from stages.weights.files import SafetensorsReader
from tests.fuzz.hostile import Changes, bounded, changed_archive
from tests.support.formats import tiny_native, tiny_universal
from tests.support.sweep import save
from tests.support.tier import examples
from tests.support.tiny_store import Tiny

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
WEIGHTS = "model-00001-of-00001.safetensors"
STEP = "store/step-00000001"


def framed(body: bytes) -> bytes:
    """Return a manifest's file."""
    return _FRAME % (body, hashlib.sha256(body).hexdigest().encode())


def many(quick: int) -> Any:
    """Return the settings of a fuzz test."""
    return settings(examples(quick), suppress_health_check=list(HealthCheck), deadline=None)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a valid example of every format."""
    folder = tmp_path_factory.mktemp("valid")
    for name in ("native", "universal", "model"):
        (folder / name).mkdir()
    tiny_native(folder / "native")
    tiny_universal(folder / "universal")
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
    save_file({"a": torch.ones(4, 3), "b": torch.ones(2)}, folder / "model" / WEIGHTS)
    index = {"weight_map": {"a": WEIGHTS, "b": WEIGHTS}, "metadata": {}}
    (folder / "model/model.safetensors.index.json").write_text(json.dumps(index))
    journal = Journal(folder / "journal.jsonl")
    journal.write("run started", procs=2)
    journal.write("slot finished", slot="a", use="b", digest="c", record={"x": [1, 2]})
    return folder


def of_format(opener: Any) -> Callable[[Path], None]:
    """Return a reader of every tensor of a checkpoint."""

    def read(place: Path) -> None:
        source = opener().open(place, Reading())
        for key, entry in source.tensors.items():
            for _ in source.read(key, 0, entry.numel):
                pass

    return read


def read_weights(place: Path) -> None:
    reader = SafetensorsReader([place])
    for name in reader.names():
        for _ in reader.chunks(name, 0, reader.spec(name).numel):
            pass
    reader.close()


def read_index(place: Path) -> None:
    for file in weight_files(place, None):
        assert file.resolve().is_relative_to(place.resolve())


READERS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "DeepSpeed's native": ("native", "*", of_format(DeepSpeed)),
    "DeepSpeed's universal": ("universal", "*", of_format(DeepSpeed)),
    "DCP": ("dcp", "*", of_format(Dcp)),
    "canonical": (STEP, "*", of_format(Canonical)),
    "safetensors": (f"model/{WEIGHTS}", "", read_weights),
    "an index": ("model", "*.json", read_index),
    "a journal": ("journal.jsonl", "", lambda place: Journal(place).state()),
}
"""What is changed of a valid example, and its reader."""


@pytest.mark.parametrize("name", READERS)
@many(45)
@given(st.data())
def test_files(name: str, valid: Path, data: Any) -> None:
    part, pattern, read = READERS[name]
    with tempfile.TemporaryDirectory() as scratch:
        place = file = Path(scratch, Path(part).name)
        if pattern:
            shutil.copytree(valid / part, place)
            files = sorted(path for path in place.rglob(pattern) if path.is_file())
            file = data.draw(st.sampled_from(files))
        else:
            shutil.copy(valid / part, place)
        changes = Changes(data)
        content = changed_archive(file.read_bytes(), changes)
        if file.name.startswith("manifest") and data.draw(st.booleans()):
            content = framed(content[content.find(b",") : -2] if b"," in content else content)
        file.write_bytes(content)
        with bounded(Path(scratch)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(place)


@many(60)
@given(st.data())
def test_a_manifest_with_a_right_checksum(valid: Path, data: Any) -> None:
    (file,) = (valid / STEP).glob("manifest*")
    whole = file.read_bytes()
    head = framed(b"").index(b",")
    body = whole[head : head + len(whole) - len(framed(b""))]
    assert framed(body) == whole
    with bounded(valid):
        Manifest.load(framed(Changes(data)(body)), "here")


SNIPPETS = (
    "&a [*a]", "!!python/object/apply:os.system [x]", "<<: *b", "${oc.env:HOME}", "- " * 200,
    "{" * 300, "${stages.train.steps}", "? [a]\n: b", "extends: ../../etc/passwd", "\x00", "\ufeff",
    "a: &x {b: *x}", "1e999", ".inf", "'", '"', "|", ">-", "%YAML 1.1", "---",
)  # fmt: skip


@many(80)
@given(st.data())
def test_a_recipe(data: Any) -> None:
    """Reading returns problems, each with its place, and raises nothing."""
    content = Changes(data)(RECIPE.read_bytes())
    for _ in range(data.draw(st.integers(0, 2))):
        lines = content.split(b"\n")
        at = data.draw(st.integers(0, len(lines)))
        lines.insert(at, data.draw(st.sampled_from(SNIPPETS)).encode())
        content = b"\n".join(lines)
    texts = st.sampled_from(SNIPPETS) | st.text(max_size=20)
    overrides = data.draw(st.lists(texts | texts.map("train.steps={}".format), max_size=2))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "recipe.yaml")
        file.write_bytes(content)
        with bounded(Path(scratch), may_leave=True):  # `extends` names any file
            _, problems = read_recipe(file, overrides)
            assert all(problem.location is not None for problem in problems)


@many(60)
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_a_message_of_a_node(content: bytes) -> None:
    with contextlib.suppress(pydantic.ValidationError):
        _STATE.validate_json(content)
