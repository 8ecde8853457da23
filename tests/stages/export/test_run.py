"""Exports by several processes, killed at any point, and done again: the same bytes, and half a
model is never taken for a whole one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from stages.export import contents, target
from stages.export.safetensors import ExportSafetensors
from stages.model.hf import HfModel
from tests.support.exports import Run
from tests.support.models import FAMILIES, context, random_source, tiny_llama_config
from tests.support.processes import forking, run_ranks
from tests.support.tier import spread
from tests.support.weights import trained

OPERATIONS = ("pwrite", "fsync", "replace", "mkdir", "rmdir", "unlink")
SHARD = "30KB"


def export(folder: str, count: Any, kill_at: int = -1) -> None:
    """Export the same tiny model; die before operation `kill_at`. `count` receives the number of
    operations."""
    place = Path(folder)
    source = random_source(tiny_llama_config(), place)
    weights = trained(source)
    for name in OPERATIONS:
        setattr(os, name, _deadly(getattr(os, name), count, kill_at))
    stage = ExportSafetensors(folder=str(place / "export"), dtype="fp32", max_shard_size=SHARD)
    stage.run(context(place), weights, source)


def _deadly(real: Callable[..., Any], count: Any, kill_at: int) -> Callable[..., Any]:
    def patched(*args: Any, **named: Any) -> Any:
        if count.value == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count.value += 1
        return real(*args, **named)

    return patched


def in_child(folder: Path, kill_at: int = -1) -> tuple[int, int]:
    """Return the exit code and the number of operations."""
    processes = forking()
    count = processes.Value("i", 0)
    child = processes.Process(target=export, args=(str(folder), count, kill_at))
    child.start()
    child.join(120)
    assert child.exitcode is not None
    return child.exitcode, count.value


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def finished_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and change time of the weight files that a partial export has finished."""
    partial = folder / "export.partial"
    try:
        begun = target.load(partial)
    except FileNotFoundError:
        return {}
    found = {name: (partial / name).stat() for name in (begun.weights if begun else ())}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], int]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    folder.mkdir()
    code, count = in_child(folder)
    assert code == 0
    assert len(list((folder / "export").glob("model-*"))) > 2
    return content(folder / "export"), count


PARTS = [0, 0.02, 0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 0.98, 0.999]


@pytest.mark.parametrize("part", spread(PARTS, 4))
def test_killed_and_done_again(
    part: float, undisturbed: tuple[dict[str, bytes], int], tmp_path: Path
) -> None:
    expected, count = undisturbed
    folder = tmp_path / "run"
    folder.mkdir()
    code, _ = in_child(folder, kill_at=int(part * count))
    assert code == -signal.SIGKILL
    if (folder / "export").exists():  # killed during the removal of the previous export
        assert content(folder / "export") == expected
    kept = finished_files(folder)
    assert in_child(folder)[0] == 0
    assert content(folder / "export") == expected
    for name, (inode, changed) in kept.items():
        now = (folder / "export" / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (inode, changed), name
    assert not (folder / "export.partial").exists()


@pytest.fixture
def begun(llama: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run whose export in fp32 ended before its proof."""

    def stop(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(contents.ModelContents, "prove", stop)
        with pytest.raises(StageError, match="Input/output error"):
            llama.export(dtype="fp32", max_shard_size=SHARD)
    return llama


def test_a_finished_file_that_was_damaged_is_written_again(begun: Run) -> None:
    partial = begun.folder.with_name("export.partial")
    files = sorted(partial.glob("model-*"))
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    before = {file.name: file.stat().st_mtime_ns for file in files}
    begun.export(dtype="fp32", max_shard_size=SHARD)
    after = {file.name: file.stat().st_mtime_ns for file in begun.folder.glob("model-*")}
    assert [name for name in before if after[name] != before[name]] == [files[1].name]


def test_other_settings_start_again(begun: Run) -> None:
    done = begun.export(dtype="bf16")
    assert [name for name in done.files if name.startswith("model")] == ["model.safetensors"]
    facts = json.loads((done.folder / "export.json").read_text())
    assert facts["weights"].keys() == {"model.safetensors"}


def test_what_is_there_already_is_not_written_again(exported: Run) -> None:
    stamps = {file.name: file.stat().st_mtime_ns for file in exported.folder.iterdir()}
    done = exported.export(dtype="fp32")
    assert (done.folder, sorted(done.files)) == (exported.folder, sorted(stamps))
    assert {file.name: file.stat().st_mtime_ns for file in done.folder.iterdir()} == stamps
    assert exported.weights.reads == []


def digest(weights: Any) -> str:
    """Return the hex digest of every tensor by name."""
    found = hashlib.sha256()
    for name in sorted(weights.names()):
        found.update(name.encode() + weights.read(name).numpy().tobytes())
    return found.hexdigest()


def export_on_rank(dist: DistContext, folder: str) -> dict[str, Any]:
    ctx = dataclasses.replace(context(Path(folder)), dist=dist)
    source = HfModel(config=FAMILIES["llama"]).run(ctx)
    weights = trained(source)
    done = ExportSafetensors(dtype="fp32").run(ctx, weights, source)
    return done.record() | {"digest": digest(source.weights()), "reads": len(weights.reads)}


def test_both_write_and_return_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(export_on_rank, 2, str(tmp_path))
    assert first["reads"] > second["reads"] > 0
    for key in ("folder", "files", "total_bytes"):
        assert first[key] == second[key]
    assert (Path(first["folder"]) / "model.safetensors").stat().st_size == first["total_bytes"]
    here = digest(random_source(FAMILIES["llama"], tmp_path).weights())
    assert first["digest"] == second["digest"] == here
