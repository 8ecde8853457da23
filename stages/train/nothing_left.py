"""A training that begins at its last step, or after it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline import Checkpoints, Context, Data, Progress, StageError
from stages.train.settings import BatchPlan


@dataclass(frozen=True, kw_only=True)
class Length:
    """The length that a recipe gives a training, and how much of it is done."""

    name: str
    """The field: `steps` or `epochs`."""
    given: float
    done: float
    """In the field's unit."""
    over: bool
    """Whether more is done than the recipe gives."""

    @classmethod
    def of(cls, config: BatchPlan, data: Data, progress: Progress) -> Length:
        """Return the length by the one of both fields that is set."""
        if config.epochs is None:
            steps = config.steps or 0
            over = progress.step > steps
            return cls(name="steps", given=steps, done=progress.step, over=over)
        size = len(data.train)
        over = progress.samples > round(config.epochs * size)
        return cls(name="epochs", given=config.epochs, done=progress.samples / size, over=over)

    def shortfall(self, slot: str) -> str:
        """Say that the recipe gives less than is done; empty if it does not."""
        if not self.over:
            return ""
        done = f"{self.done:.10g}" if self.name == "steps" else f"{self.done:.3g}"
        return (
            f"{slot}.{self.name}={self.given:.10g} is below the {done} {self.name} that are done: "
            "the weights are unchanged"
        )


def require_steps_left(
    ctx: Context, checkpoints: Checkpoints, length: Length, progress: Progress, total: int
) -> None:
    """Raise StageError if a run that starts from another's checkpoint has no step to take."""
    own = "loss" in progress.metrics or not getattr(checkpoints, "start_from", None)
    if not own and progress.step >= total:
        name, more = length.name, f"{length.done + length.given:.10g}"
        counts = f"step count ({progress.step})"
        if name == "epochs":
            counts = f"position in the data ({length.done:.3g} epochs)"
        raise StageError(
            f"`start_from` continues its {counts}, and `{ctx.slot}.{name}` is "
            f"{length.given:.10g}: nothing would be trained",
            hint=f"to continue: {ctx.slot}.{name}={more}; to train its weights again: its export "
            "as the model slot's path, without start_from",
        )
