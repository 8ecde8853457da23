"""Commits of names of the hub: asked once, or taken from its cache; and addresses that would make
fsspec run or fetch something, which are refused before it sees them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner, Result
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, register_implementation
from huggingface_hub import constants

from pipeline.cli import main
from pipeline.errors import StageError, UsageError
from pipeline.utils import hub
from pipeline.utils.hub import (
    PROTOCOLS,
    HubName,
    address_problems,
    commit_of,
    open_address,
    recorded,
)
from tests.support.hub import FIRST, SECOND, HubCache, HubServer, hub_cache, hub_server

__all__ = ["hub_cache", "hub_server"]


def model(repo: str = "owner/name", revision: str | None = None) -> HubName:
    return HubName(kind="model", repo=repo, revision=revision, named_by="path", key="revision")


def test_the_hub_is_asked_once(hub_server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    hub_server.add("owner/name", main=FIRST, v1=SECOND)
    assert [commit_of(model()) for _ in range(3)] == [FIRST] * 3
    assert commit_of(model(revision="v1")) == SECOND
    assert commit_of(model(revision="3" * 40)) == "3" * 40
    of_models = [line for line in hub_server.requests if "/models/" in line]
    assert of_models == [
        "GET /api/models/owner/name/revision/main", "GET /api/models/owner/name/revision/v1",
    ]  # fmt: skip
    said = [f"model: owner/name is main at {FIRST}", f"model: owner/name is v1 at {SECOND}"]
    assert capsys.readouterr().err.splitlines() == said


def test_a_hub_that_fails_is_not_asked_again_for_a_while(
    hub_server: HubServer,
    hub_cache: HubCache,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub_server.add("owner/name", main=FIRST)
    hub_server.status = 503
    for name in (model(), model(), model("owner/other"), model()):
        with pytest.raises(StageError, match="answers 503"):
            commit_of(name)
    assert len(hub_server.requests) == 1
    hub_cache.refer("model", "owner/third", main=SECOND)  # what is here needs no network
    assert commit_of(model("owner/third")) == SECOND
    hub._silent.clear()
    monkeypatch.setattr(hub, "AGAIN", 0.0)
    with pytest.raises(StageError, match="answers 503"):
        commit_of(model())
    hub_server.status = None
    assert commit_of(model()) == FIRST
    monkeypatch.setattr("pipeline.utils.terminal.shows", "quiet")
    hub._asked.cache_clear()
    capsys.readouterr()
    assert commit_of(model()) == FIRST
    assert capsys.readouterr().err == ""


def test_a_data_set(hub_server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    hub_server.add("owner/rows", kind="dataset", main=FIRST)
    name = HubName(kind="dataset", repo="owner/rows", revision=None, named_by="", key="")
    assert commit_of(name) == FIRST
    assert capsys.readouterr().err == f"data set: owner/rows is main at {FIRST}\n"


def test_what_a_run_has_found_is_kept(
    hub_server: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hub_server.add("owner/name", main=SECOND)
    known = recorded([model().record(FIRST), {"kind": "model"}, 3])
    assert known == {("model", "owner/name", "main"): FIRST}
    assert commit_of(model(), known) == FIRST
    assert hub_server.requests == []
    said = f"model: owner/name is main at {FIRST}, as when this run began\n"
    assert capsys.readouterr().err == said


def test_offline_the_cache_is_asked(
    hub_cache: HubCache, capsys: pytest.CaptureFixture[str]
) -> None:
    hub_cache.refer("model", "owner/name", main=FIRST, v1=SECOND)
    assert (commit_of(model()), commit_of(model(revision="v1"))) == (FIRST, SECOND)
    first = capsys.readouterr().err.splitlines()[0]
    why = "in this machine's cache (HF_HUB_OFFLINE is set)"
    assert first == f"model: owner/name is main at {FIRST} {why}"


@pytest.mark.parametrize("status", [500, 503, None])
def test_a_hub_that_does_not_answer(
    hub_server: HubServer, hub_cache: HubCache, status: int | None,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    hub_cache.refer("model", "owner/name", main=FIRST)
    hub_server.status = status
    if status is None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert commit_of(model()) == FIRST
    why = f"answers {status}" if status else "cannot be reached, ConnectError"
    assert f"in this machine's cache ({constants.ENDPOINT} {why})" in capsys.readouterr().err


def test_the_only_commit_of_a_cache(
    hub_cache: HubCache, capsys: pytest.CaptureFixture[str]
) -> None:
    """A download of a commit leaves no branch."""
    folder = hub_cache.refer("model", "owner/name") / "snapshots"
    (folder / SECOND).mkdir(parents=True)
    assert commit_of(model()) == SECOND
    assert "the only commit in this machine's cache" in capsys.readouterr().err
    with pytest.raises(StageError, match=f"no commit of v1, .*set `revision` to .*{SECOND}"):
        commit_of(model(revision="v1"))
    (folder / FIRST).mkdir()
    with pytest.raises(StageError, match=f"set `revision` to one of these: {FIRST}, {SECOND}"):
        commit_of(model("owner/name", "main"))


def test_nothing_is_known(hub_cache: HubCache) -> None:
    message = (
        f"owner/name: this machine's cache {hub_cache.folder}/models--owner--name has no "
        "commit of main, and HF_HUB_OFFLINE is set (`hf download owner/name --local-dir name` "
        "where there is a network (for a plan config.json is enough), copy the folder here, and "
        "set model.path=./name)"
    )
    with pytest.raises(StageError, match=re.escape(message)):
        commit_of(model())


def test_mistakes_in_a_name(hub_server: HubServer) -> None:
    hub_server.add("owner/name", main=FIRST)
    with pytest.raises(StageError, match=r"owner/nmae: the hub shows no such model .*HF_TOK"):
        commit_of(model("owner/nmae"))
    with pytest.raises(StageError, match="owner/name has no branch, tag or commit `v7`"):
        commit_of(model(revision="v7"))


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


@pytest.mark.parametrize("address", HOSTILE)
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


@pytest.mark.parametrize("address", HOSTILE)
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
