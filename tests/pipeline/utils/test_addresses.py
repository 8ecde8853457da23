"""Addresses that would make fsspec run or fetch something are refused before it sees them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner, Result
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, register_implementation

from pipeline.cli import main
from pipeline.errors import UsageError
from pipeline.utils.addresses import PROTOCOLS, address_problems, open_address

MARK = "PIPE_TEST_MARK"


class Runs(MemoryFileSystem):  # type: ignore[misc]
    """A file system that runs a command as soon as it is made, as fsspec's `reference` did with a
    template of the file that it read (before 2026)."""

    protocol = "reference"
    cachable = False

    def __init__(self, *_: Any, **options: Any) -> None:
        assert os.system(f"touch '{os.environ[MARK]}'") == 0
        super().__init__()


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file that exists once a file system has run its command."""
    before = dict(_registry)
    for protocol in ("reference", "runs", "github", "simplecache"):
        register_implementation(protocol, Runs, clobber=True)
    monkeypatch.setenv(MARK, str(tmp_path / "ran"))
    yield tmp_path / "ran"
    _registry.clear()
    _registry.update(before)


HOSTILE = (
    "reference::memory://refs.json", "reference://refs.json", "simplecache::reference://x",
    "runs://x", "github://owner:repo@main/x", "memory://x::runs://y", "simplecache::memory://x",
)  # fmt: skip


@pytest.mark.parametrize("address", HOSTILE)
def test_the_door(mark: Path, address: str) -> None:
    with pytest.raises(UsageError, match="is not opened"):
        open_address(f"{address}/step-00000001")
    assert not mark.exists()
    fsspec.core.url_to_fs(address.replace("memory://x::", ""))  # what it keeps from happening
    assert mark.exists() or address.endswith("memory://x")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_path_and_known_protocols(protocol: str) -> None:
    assert not list(address_problems("folder", "a::b/c"))
    assert not list(address_problems("folder", None))
    for problem in address_problems("folder", f"{protocol}://bucket/x"):
        assert problem.message == f"{protocol}:// needs a package"


def pipe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


@pytest.mark.parametrize("address", [HOSTILE[0], HOSTILE[3]])
def test_commands(mark: Path, tmp_path: Path, address: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("name: x\nstages: {}\n")
    (run / "checkpoints.at").write_text(address)
    place = f"{address}/step-00000001"
    commands = (
        ("inspect", address), ("inspect", place), ("inspect", run), ("export", run),
        ("export", place, "--model", model, "--out", tmp_path / "out"),
        ("convert", place, tmp_path / "out", "--to", "canonical"),
    )  # fmt: skip
    for command in commands:
        result = pipe(*command)
        assert (result.exit_code, mark.exists()) == (2, False), (command, result.output)
        assert "a bug in pipe" not in result.stderr


RECIPE = """name: x
launch: {{procs: 1, device: cpu}}
stages:
  model: {{use: model.hf, config: {{model_type: llama}}}}
  data:
    use: data.stream
    shards:
      - {address}/a.jsonl
  checkpoint:
    use: checkpoint.sharded
    folder: {address}
    start_from: {address}
  train: {{use: train.finished, checkpoint: "{address}"}}
"""


@pytest.mark.parametrize("address", [HOSTILE[0], HOSTILE[3]])
def test_fields_of_a_recipe(mark: Path, tmp_path: Path, address: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(address=address))
    for command in ("check", "run"):
        result = pipe(command, recipe)
        assert (result.exit_code, mark.exists()) == (2, False), result.output
    for place, key in (
        ("8:9", "data.shards.0"), ("11:13", "checkpoint.folder"),
        ("12:17", "checkpoint.start_from"), ("13:44", "train.checkpoint"),
    ):  # fmt: skip
        (line,) = (each for each in result.stderr.splitlines() if f"recipe.yaml:{place}" in each)
        assert f"{key}: " in line
        assert "is not opened" in line
