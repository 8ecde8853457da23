"""What every test runs under."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import settings

# One thread a process: results do not depend on the machine's cores, and ranks do not fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing in the suite may reach for the hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# Time limits on shared machines measure the machine.
settings.register_profile("pipetrain", deadline=None)
settings.load_profile("pipetrain")

# A suite started in the background inherits signals that are ignored, and so would every run in it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

COMPILE = """
import logging, torch
from pipeline.dist import Dist
from stages.wrap.zero.compat import point_at_device
point_at_device(Dist(device=torch.device("cpu")))
from deepspeed.accelerator import get_accelerator
for name in ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "PinMemoryBuilder",
             "AsyncIOBuilder"):
    builder = get_accelerator().create_op_builder(name)
    if builder is not None and builder.is_compatible():
        builder.load(verbose=False)
"""


@pytest.fixture(scope="session")
def deepspeed_operators() -> None:
    """DeepSpeed's operators, compiled before any test whose time is limited needs one."""
    said = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
