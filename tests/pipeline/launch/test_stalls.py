"""Collectives of ranks that stand still."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from pipeline.launch import stalls


def test_the_flight_recorder_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = stalls.recorder_environment(tmp_path)
    pipe = Path(variables["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "1.pipe")
    os.mkfifo(pipe)
    heard = []
    listener = threading.Thread(target=lambda: heard.append(pipe.read_bytes()))
    listener.start()
    deadline = time.monotonic() + 10
    while listener.is_alive() and time.monotonic() < deadline:
        stalls.request_collectives(tmp_path, [0, 1])  # rank 0 has no recorder
        time.sleep(0.05)
    listener.join(1)
    assert heard == [b"1"]
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "5")
    assert stalls.recorder_environment(tmp_path) == {}
