"""The stage `wrap.zero`. Importing this imports neither torch nor deepspeed."""

from __future__ import annotations

from stages.wrap.zero.stage import Aio, OptimizerOffload, ParameterOffload, PlusPlus, Zero

__all__ = ["Aio", "OptimizerOffload", "ParameterOffload", "PlusPlus", "Zero"]
