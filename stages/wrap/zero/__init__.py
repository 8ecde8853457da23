"""The stage `wrap.zero`. Importing this imports neither torch nor deepspeed."""

from stages.wrap.zero.fields import Aio, OptimizerOffload, ParameterOffload, PlusPlus
from stages.wrap.zero.stage import Zero

__all__ = ["Aio", "OptimizerOffload", "ParameterOffload", "PlusPlus", "Zero"]
