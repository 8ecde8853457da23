"""The environment that other launchers set, and the parts that they leave out."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.distributed import process_group
from pipeline.distributed.environment import CONTRACT, STARTED, all_here, require_contract
from pipeline.errors import UsageError

CLUSTER = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all traces of a launcher."""
    for name in (*CONTRACT, *STARTED, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MASTER_ADDR": "somewhere"},
        {**CLUSTER, "WORLD_SIZE": "1", "PET_NNODES": "1"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        {**CLUSTER, "LOCAL_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_a_process_by_itself_or_a_whole_contract(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    set_all(monkeypatch, variables)
    require_contract()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2 is set by a launcher"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 is set by a launcher"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4 is set by a launcher of several"),
        (
            CLUSTER,
            "RANK=0 and WORLD_SIZE=2 is set by a launcher of several processes, but not "
            "LOCAL_RANK: each process would make a run of its own",
        ),
        (
            {"LOCAL_RANK": "0"},
            "LOCAL_RANK=0 is set by a launcher of several processes, but not "
            "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: each",
        ),
        ({**CLUSTER, "LOCAL_RANK": "no"}, "LOCAL_RANK=no, which is not a number"),
        ({**CLUSTER, "LOCAL_RANK": "0", "RANK": "2"}, "RANK=2 and WORLD_SIZE=2: ranks count"),
    ],
)
def test_several_processes_that_are_told_a_part(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str, tmp_path: Path
) -> None:
    set_all(monkeypatch, variables)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: x\nstages: {}\n")
    for command in ("run", "resume"):
        result = CliRunner().invoke(main, [command, "recipe.yaml"])
        assert (command, result.exit_code) == (command, 2)
        assert f"error: {words}" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_benchmark_is_one_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    result = CliRunner().invoke(main, ["bench", "recipe.yaml"])
    assert result.exit_code == 2
    assert "SLURM_STEP_NUM_TASKS=2 is set by a launcher of several processes" in result.stderr


@pytest.mark.parametrize(
    ("variables", "here"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, False),
        ({"LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, True),
    ],
)
def test_whether_all_are_here(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], here: bool
) -> None:
    set_all(monkeypatch, CLUSTER | variables if variables else {})
    assert all_here() is here


def test_rank_0_serves_the_others_at_the_address_that_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.2", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    set_all(monkeypatch, CLUSTER | place | {"WORLD_SIZE": "1"})
    store = process_group.environment_store()
    assert store is not None
    store.set("key", "value")
    socket.create_connection(("127.0.0.2", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "that is 127.0.0.1 here, which other machines do not reach"),
        ("203.0.113.9", "Cannot assign requested address"),
    ],
)
def test_an_address_that_rank_0_cannot_serve_the_others_at(
    monkeypatch: pytest.MonkeyPatch, host: str, words: str
) -> None:
    set_all(monkeypatch, CLUSTER | {"MASTER_ADDR": host, "LOCAL_RANK": "0"})
    with pytest.raises(UsageError, match=f"rank 0 cannot listen at MASTER_ADDR={host}.*{words}"):
        process_group.environment_store()
