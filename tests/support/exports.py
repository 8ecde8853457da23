"""A trained tiny model, ready to be exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource
from stages.export.safetensors import ExportSafetensors
from tests.support.models import context, random_source
from tests.support.weights import MemoryWeights, trained


class Run(NamedTuple):
    """A trained model, ready to be exported to `folder`."""

    folder: Path
    source: ModelSource
    weights: MemoryWeights

    def export(self, **fields: Any) -> ExportedModel:
        stage = ExportSafetensors(folder=str(self.folder), **fields)
        return stage.run(context(self.folder.parent), self.weights, self.source)


def run_of(config: dict[str, Any], tmp_path: Path) -> Run:
    source = random_source(config, tmp_path)
    return Run(tmp_path / "export", source, trained(source))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor in the weight files."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return tensors
