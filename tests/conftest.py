"""What every test runs under."""

from __future__ import annotations

import os

from hypothesis import settings

# One thread a process: results do not depend on the machine's cores, and ranks do not fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing in the suite may reach for the hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# Time limits on shared machines measure the machine.
settings.register_profile("pipetrain", deadline=None)
settings.load_profile("pipetrain")
