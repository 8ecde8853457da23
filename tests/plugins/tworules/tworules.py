"""Orthogonalised momentum (Jordan et al. 2024, Muon) for matrices of blocks, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from pipeline import Context, NamedParameter, OptimizerPlan, UpdateRule
from stages.optimizer import OptimizerSettings

ORTHOGONAL = UpdateRule("orthogonal", elementwise=False)
ADAMW = UpdateRule("adamw")


@dataclass(frozen=True, kw_only=True)
class TwoRules(OptimizerSettings):
    """Declare orthogonalised momentum for the matrices of blocks, at a constant rate, and AdamW for
    all other parameters, with the schedule and groups of these settings."""

    matrix_lr: Annotated[float, Field(gt=0)] = 0.02
    """Learning rate of matrices."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """How much of the previous direction is kept."""

    def update_rules(self) -> Sequence[UpdateRule]:
        return [ORTHOGONAL, ADAMW]

    def run(self, ctx: Context) -> OptimizerPlan:
        from torch.optim import AdamW

        from tests.plugins.tworules.tworules_rule import Orthogonal

        matrices = replace(self, lr=self.matrix_lr, schedule="constant", groups=())
        return self.plan_of(
            matrices.part(
                Orthogonal, rule=ORTHOGONAL, name="matrices", takes=is_matrix_of_a_block,
                moments=("momentum_buffer",), counts_updates=False, momentum=self.momentum,
            ),
            self.part(AdamW, rule=ADAMW, name="rest", moments=("exp_avg", "exp_avg_sq")),
        )  # fmt: skip


def is_matrix_of_a_block(parameter: NamedParameter) -> bool:
    """Whether it is the weight of a linear layer or of experts inside of a numbered block; neither
    the embedding nor the head is."""
    from torch.nn import Embedding, Linear

    kind = parameter.kind
    assert kind is not None
    in_block = any(part.isdecimal() for part in parameter.name.split("."))
    linear = len(parameter.shape) == 2 and issubclass(kind, Linear)
    experts = len(parameter.shape) == 3 and not issubclass(kind, Embedding)
    return in_block and (linear or experts)
