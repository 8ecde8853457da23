"""Planners of the stages that export."""

from __future__ import annotations

from pipeline.planning.estimate import Exported, HostNeed, Storage
from pipeline.planning.planner import Planner
from pipeline.planning.shapes import BYTES, ModelShape
from pipeline.planning.timeline import EXPORT
from pipeline.planning.topology import Topology
from stages.export.adapter import ExportAdapter
from stages.export.safetensors import ExportSafetensors

BUFFERS = 64 << 20
"""Bytes for what is on its way, and activations of a short prompt."""
WIDE = BYTES["fp32"]


class ExportPlanner(Planner[ExportSafetensors]):
    """Planner of `export.safetensors`: disk for the weight files; host memory of rank 0's node for
    the proof, which holds what belongs to no block and one block at a time."""

    def forecast(self, topology: Topology, model: ModelShape) -> Exported:
        size = BYTES.get(self.stage.dtype, WIDE)
        files = model.exported * size
        what = f"{size} bytes x (what is outside of blocks + one block)"
        return Exported(
            host=[_proof(model.proven * size, what)],
            storage=[Storage(what="export", bytes=files, formula=f"{size} bytes a parameter")],
            loaded=files,
        )


class AdapterPlanner(Planner[ExportAdapter]):
    """Planner of `export.adapter`: an adapter is proven in fp32, and loaded with its model, at most
    in fp32."""

    def forecast(self, topology: Topology, model: ModelShape) -> Exported:
        number = BYTES[self.stage.dtype]
        size = number * model.trained
        what = f"{WIDE} bytes x (what is outside of blocks + one block) + the adapter"
        formula = f"{number} bytes a trained parameter"
        return Exported(
            host=[_proof(model.proven * WIDE + size, what)],
            storage=[Storage(what="export", bytes=size, formula=formula)],
            loaded=model.exported * WIDE + size,
        )


def _proof(size: int, formula: str) -> HostNeed:
    return HostNeed(
        phase=EXPORT,
        what="proof of the export",
        bytes=size + BUFFERS,
        formula=f"{formula} + 64 MiB",
    )
