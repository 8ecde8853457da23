"""The artifact that wrap.zero gives; the checkpoint stage for DeepSpeed's format needs it."""

from __future__ import annotations

from typing import Any

from pipeline.engine import Engine


class ZeroEngine(Engine):
    """An engine whose training state lives in a DeepSpeed engine."""

    deepspeed: Any
    """The live `deepspeed.DeepSpeedEngine`."""
