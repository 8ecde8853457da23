"""Waiting and sharing among real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.distributed.environment import is_worker, worker_rank, worker_world_size
from pipeline.distributed.process_group import PIECE, DistContext
from tests.support.processes import run_ranks


def _exchange(dist: DistContext, folder: str) -> dict[str, Any]:
    store = dist.store
    assert store is not None
    shared, keys = [], []
    for number in range(20):
        shared.append(dist.broadcast_str(f"text {number}" if dist.is_main else None))
        with dist.rank0_first() as main:
            file = Path(folder, str(number))
            if main:
                file.touch()
            else:
                assert file.exists()
        dist.barrier()
        keys.append(store.num_keys())
    return {"shared": shared, "keys": keys[2:]}


def test_calls_agree_and_leave_no_keys(tmp_path: Path) -> None:
    found = run_ranks(_exchange, 3, str(tmp_path))
    assert [rank["shared"] for rank in found] == [[f"text {n}" for n in range(20)]] * 3
    for rank in found:
        assert max(rank["keys"]) - min(rank["keys"]) <= 8


def _long(dist: DistContext) -> int:
    return len(dist.broadcast_str("x" * (2 * PIECE + 7) if dist.is_main else None))


def test_long_texts_are_shared_in_pieces() -> None:
    assert run_ranks(_long, 2) == [2 * PIECE + 7] * 2


def test_one_process_waits_for_nobody() -> None:
    dist = DistContext(device=None)  # type: ignore[arg-type]
    dist.barrier()
    assert dist.broadcast_str("text") == "text"
    with dist.rank0_first() as main:
        assert main


def test_the_torchrun_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert not is_worker()
        assert worker_rank() == 0
        assert worker_world_size() is None
        monkeypatch.setenv(name, "3")
    assert is_worker()
    assert (worker_rank(), worker_world_size()) == (3, 3)
