"""Which recipes can be traced and measured."""

from __future__ import annotations

from pipeline.engine import Engine
from pipeline.errors import UsageError
from pipeline.plan import Plan


def require_engine(plan: Plan) -> None:
    """Raises UsageError for a recipe whose steps no engine makes, as where the stage that trains
    wraps the model itself."""
    if not any(issubclass(step.gives or object, Engine) for step in plan.steps):
        raise UsageError(
            "nothing can be traced or measured: no slot of the recipe gives an engine",
            hint="plan it by arithmetic, without --trace and --measure",
        )
