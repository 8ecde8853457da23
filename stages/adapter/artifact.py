"""The artifact that adapter stages give; the stage that exports an adapter alone needs it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.model.derived import DerivedSource

if TYPE_CHECKING:
    from stages.adapter.four_bits import Kind


class AdaptedModel(DerivedSource):
    """A model whose own weights stay as they are, with an adapter that is trained."""

    @property
    @abstractmethod
    def trained(self) -> Sequence[str]:
        """Names of the parameters that are trained, all of the adapter."""

    @property
    @abstractmethod
    def quantize(self) -> Kind | None:
        """In which 4 bits the model's own linear layers are, if they are."""

    @abstractmethod
    def save_config(self, folder: Path) -> None:
        """Write what peft needs beside the weights. Raises StageError for a training that an
        adapter cannot express."""
