"""The artifact that adapter stages give; the stage that exports an adapter alone needs it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stages.model.derived import DerivedSource

FourBits = Literal["nf4", "fp4"]
"""The 16 values that 4 bits stand for: quantiles of a normal distribution, or floating-point
numbers."""


class AdaptedModel(DerivedSource):
    """A model whose own weights stay as they are, with an adapter that is trained."""

    @property
    @abstractmethod
    def trained(self) -> Sequence[str]:
        """Names of the parameters that are trained, all of the adapter."""

    @property
    @abstractmethod
    def quantize(self) -> FourBits | None:
        """In which 4 bits the model's own linear layers are, if they are."""

    @abstractmethod
    def save_config(self, folder: Path) -> None:
        """Write what peft needs beside the weights. Raises StageError for a training that an
        adapter cannot express."""
