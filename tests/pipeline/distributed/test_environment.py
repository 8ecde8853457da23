"""This process's place among others, by the variables of its launcher."""

from __future__ import annotations

import pytest

from pipeline.distributed.environment import (
    TORCHRUN_VARIABLES,
    is_single_node,
    is_worker,
    started,
    worker_rank,
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN_VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_torchrun_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert (is_worker(), worker_rank(), started().procs) == (False, 0, None)
        monkeypatch.setenv(name, "3")
    assert (is_worker(), worker_rank(), started().procs) == (True, 3, 3)


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
    cluster = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "23456"}
    for name, value in (cluster | variables if variables else {}).items():
        monkeypatch.setenv(name, value)
    assert is_single_node() is here
