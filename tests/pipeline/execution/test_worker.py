"""A rank: what it imports, and that it watches itself where nobody else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.distributed.environment import rank_environment
from pipeline.errors import StageError
from pipeline.execution import failures
from pipeline.execution.run_spec import RunSpec
from pipeline.execution.worker import run_rank
from tests.support.models import save_tokenizer
from tests.support.ports import free_port
from tests.support.runs import TINY

SELF = """
import sys, time
from pathlib import Path
from pipeline.distributed.heartbeat import Phase
from pipeline.distributed.process_group import DistContext
from pipeline.distributed.settings import Timeouts
from pipeline.execution.worker import watched
dist = DistContext(rank=5, device=None)
heartbeat = dist.heartbeat
heartbeat.beat(Phase.STEP, step=3)
with watched(Path(sys.argv[1]), dist, Timeouts(step=1.5)):
    for _ in range(30):
        time.sleep(0.1)
        heartbeat.beat()
    print("alive", flush=True)
    time.sleep(60)
"""


def test_a_rank_that_nobody_watches_watches_itself(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SELF, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "alive\n")
    assert time.monotonic() - began < 30
    report = (tmp_path / "failures" / "rank-00005.json").read_text()
    assert "this rank has given no sign of life for" in report
    assert "in step 3" in report
    assert 'File "<string>", line 16' in (tmp_path / "logs" / "rank-00005.log").read_text()


STOPPED = """
import os, signal, sys, time
from pathlib import Path
from pipeline.distributed.process_group import DistContext
from pipeline.distributed.settings import Timeouts
from pipeline.execution import worker
worker.STOP_SECONDS = 2.0
dist = DistContext(rank=5, device=None)
with worker.watched(Path(sys.argv[1]), dist, Timeouts()), dist.stop.deferred():
    with dist.heartbeat.waiting():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
"""


def test_a_rank_that_is_asked_to_stop_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED, str(tmp_path)], check=False, timeout=40)
    assert done.returncode == 1
    report = (tmp_path / "failures" / "rank-00005.json").read_text()
    assert "this rank was asked to stop, and the others do not come" in report


def test_a_log_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    """A rank under another launcher would end without a word."""
    (tmp_path / "logs").touch()
    with pytest.raises(StageError, match="logs"):
        run_rank(RunSpec(run_dir=str(tmp_path), recipe={}))
    assert failures.first_rank(tmp_path) == 0
    assert "rank 0 failed before the first slot: " in str(failures.first(tmp_path, []))


SCRIPT = """
import sys
from pipeline.cli import main
main({command}, standalone_mode=False)
assert "pipeline.execution.runner" in sys.modules  # it ran here, not in a child
assert not [name for name in sys.modules if name.startswith("pipeline.planning")]
"""


@pytest.mark.full
def test_neither_a_run_nor_its_resumption_imports_planning(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("the lamb was sure to go\n" * 100)
    stages = {
        "model": {"use": "model.hf", "config": TINY, "tokenizer": "./tokenizer"},
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {"use": "data.text", "files": "./text.txt", "sequence_length": 8},
        "optimizer": {"use": "optimizer.adamw"},
        "wrap": {"use": "wrap.fsdp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {"use": "train.causal_lm", "steps": 2, "global_batch_size": 2},
    }
    recipe = {"name": "tiny", "launch": {"procs": 1, "device": "cpu"}, "stages": stages}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    for command in (["run", "recipe.yaml", "--run-dir", "run"], ["resume", "run", "train.steps=3"]):
        code = SCRIPT.format(command=command)
        alone = rank_environment(0, 1)
        alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
            env=os.environ | alone,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 3
    assert not (tmp_path / "run/memory.json").exists()  # CPUs have no trace to take
