"""`pipe plan` and `pipe advise`: memory and time of a recipe, before anything is rented.

This is also the door for authors of planners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.packages import lazily

if TYPE_CHECKING:  # isort: off
    from pipeline.planning.advise import AdviceRequest as AdviceRequest
    from pipeline.planning.forecast import (
        BACKWARD as BACKWARD, BUFFERS as BUFFERS, Collective as Collective, Copies as Copies,
        EXPORT as EXPORT, Extra as Extra, FORWARD as FORWARD, GATHERED as GATHERED,
        GRADIENTS as GRADIENTS, IN_BACKWARD as IN_BACKWARD, Item as Item,
        Kind as Kind, LOADED as LOADED, Moment as Moment, OPTIMIZER as OPTIMIZER,
        PARAMETERS as PARAMETERS, Pass as Pass, PipelineRank as PipelineRank,
        PipelineStage as PipelineStage, Place as Place, Profile as Profile, RESUME as RESUME,
        SAVE as SAVE, StrategyMemory as StrategyMemory, Traffic as Traffic, UPDATE as UPDATE,
        UPDATE_TEMPORARIES as UPDATE_TEMPORARIES, Unit as Unit, WHOLE_GRADIENTS as WHOLE_GRADIENTS,
    )  # fmt: skip
    from pipeline.planning.planner import (
        AWAY as AWAY, CHUNK as CHUNK, NARROW_FROZEN as NARROW_FROZEN,
        NARROW_MASTERS as NARROW_MASTERS, NARROW_MOMENTS as NARROW_MOMENTS, Planner as Planner,
        Preset as Preset, Presets as Presets, RECOMPUTE as RECOMPUTE, REDUCE as REDUCE,
        SMALLER as SMALLER, Saving as Saving, Tier as Tier, TraceScope as TraceScope,
        Trial as Trial,
    )  # fmt: skip
    from pipeline.planning.shapes import (
        BYTES as BYTES, Division as Division, ModelShape as ModelShape,
        OptimizerShape as OptimizerShape, SampleShape as SampleShape, Sizes as Sizes,
        Step as Step, Topology as Topology, Weight as Weight,
    )  # fmt: skip
    from pipeline.planning.trace.torch_compat import traced_backend as traced_backend
    from pipeline.recipe.dump import reads_back as reads_back
else:
    __getattr__, __dir__ = lazily(__name__, __file__)
