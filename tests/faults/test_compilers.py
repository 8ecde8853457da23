"""A run that is ended while DeepSpeed's operators are compiled."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.pipe import Pipe
from tests.support.tiny_recipe import training, write
from tests.support.waiting import becomes, descendants

SLOW = """#!/bin/sh
case "$*" in *" -c "*) sleep 600;; esac
exec g++ "$@"
"""


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_waited_for_and_nothing_is_left(
    pipe: Pipe, tmp_path: Path, number: signal.Signals
) -> None:
    """The launcher's end, in any way."""
    compiler = tmp_path / "g++"
    compiler.write_text(SLOW)
    compiler.chmod(0o755)
    stages = training(wrap="wrap.zero", checkpoint={"every": 10}, train={"steps": 2})
    recipe = write(tmp_path / "recipe.yaml", stages, procs=2)
    command = ("-m", "pipetrain", "run", str(recipe), "--run-dir", str(pipe.run_dir))
    kept = str(tmp_path / "operators")
    process = pipe.start(*command, CXX=str(compiler), TORCH_EXTENSIONS_DIR=kept)
    started = descendants(process.pid, "sleep")
    process.send_signal(number)
    ended = pipe.end(process, limit=30)
    assert ended.code == (-number if number == signal.SIGKILL else 75), ended
    assert becomes(lambda: not any(child.is_running() for child in started), 15), started
