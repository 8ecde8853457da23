"""Where the messages of libraries go."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from pipeline.execution.rank_logging import COMPILERS, compilers_aside, rank_log
from pipeline.launch.start import keep_compiled


def warn_everywhere(folder: Path) -> str:
    """Return the log of a rank in which each of torch's compilers has warned."""
    with rank_log(folder, 0) as log, compilers_aside(log):
        for name in COMPILERS:
            logging.getLogger(name).warning("said by %s", name)
    return (folder / "logs" / "rank-00000.log").read_text()


def test_compilers_warn_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    before = {name: logging.getLogger(name).handlers for name in COMPILERS}
    assert all(before.values()), "torch no longer has handlers of its own here"
    told = warn_everywhere(tmp_path)
    assert [name for name in COMPILERS if f"WARNING said by {name}\n" not in told] == []
    assert {name: logging.getLogger(name).handlers for name in COMPILERS} == before


def test_the_logger_is_as_it_was_before(tmp_path: Path) -> None:
    """pytest gives handlers of its own to loggers that do not propagate."""
    log = logging.getLogger("pipe")
    before = log.level, log.propagate, list(log.handlers)
    with rank_log(tmp_path, 0):
        assert not log.propagate
    assert (log.level, log.propagate, log.handlers) == before
    assert log.propagate


def test_who_asks_for_torchs_logs_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    assert "said by" not in warn_everywhere(tmp_path)


def test_compiled_code_is_kept_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/own")
    keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/own"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "pipetrain" / "compiled")
