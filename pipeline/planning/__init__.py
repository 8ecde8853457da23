"""`pipe plan` and `pipe advise`: memory and time of a recipe, before anything is rented.

This is also the door for authors of planners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.lazy import lazily

if TYPE_CHECKING:
    from pipeline.planning.advise import AdviceRequest as AdviceRequest
    from pipeline.planning.forecast import BACKWARD as BACKWARD
    from pipeline.planning.forecast import BUFFERS as BUFFERS
    from pipeline.planning.forecast import EXPORT as EXPORT
    from pipeline.planning.forecast import FORWARD as FORWARD
    from pipeline.planning.forecast import GATHERED as GATHERED
    from pipeline.planning.forecast import GRADIENTS as GRADIENTS
    from pipeline.planning.forecast import IN_BACKWARD as IN_BACKWARD
    from pipeline.planning.forecast import LOADED as LOADED
    from pipeline.planning.forecast import OPTIMIZER as OPTIMIZER
    from pipeline.planning.forecast import PARAMETERS as PARAMETERS
    from pipeline.planning.forecast import RESUME as RESUME
    from pipeline.planning.forecast import SAVE as SAVE
    from pipeline.planning.forecast import UPDATE as UPDATE
    from pipeline.planning.forecast import UPDATE_TEMPORARIES as UPDATE_TEMPORARIES
    from pipeline.planning.forecast import WHOLE_GRADIENTS as WHOLE_GRADIENTS
    from pipeline.planning.forecast import Collective as Collective
    from pipeline.planning.forecast import Copies as Copies
    from pipeline.planning.forecast import Extra as Extra
    from pipeline.planning.forecast import Gradients as Gradients
    from pipeline.planning.forecast import Item as Item
    from pipeline.planning.forecast import Kind as Kind
    from pipeline.planning.forecast import Moment as Moment
    from pipeline.planning.forecast import Pass as Pass
    from pipeline.planning.forecast import PipelineRank as PipelineRank
    from pipeline.planning.forecast import PipelineStage as PipelineStage
    from pipeline.planning.forecast import Place as Place
    from pipeline.planning.forecast import StrategyMemory as StrategyMemory
    from pipeline.planning.forecast import Traffic as Traffic
    from pipeline.planning.forecast import Unit as Unit
    from pipeline.planning.planner import AWAY as AWAY
    from pipeline.planning.planner import CHUNK as CHUNK
    from pipeline.planning.planner import NARROW_FROZEN as NARROW_FROZEN
    from pipeline.planning.planner import NARROW_MASTERS as NARROW_MASTERS
    from pipeline.planning.planner import NARROW_MOMENTS as NARROW_MOMENTS
    from pipeline.planning.planner import RECOMPUTE as RECOMPUTE
    from pipeline.planning.planner import REDUCE as REDUCE
    from pipeline.planning.planner import SMALLER as SMALLER
    from pipeline.planning.planner import Planner as Planner
    from pipeline.planning.planner import Preset as Preset
    from pipeline.planning.planner import Presets as Presets
    from pipeline.planning.planner import Saving as Saving
    from pipeline.planning.planner import Tier as Tier
    from pipeline.planning.planner import TraceScope as TraceScope
    from pipeline.planning.planner import Trial as Trial
    from pipeline.planning.profile import Profile as Profile
    from pipeline.planning.shapes import BYTES as BYTES
    from pipeline.planning.shapes import Division as Division
    from pipeline.planning.shapes import ModelShape as ModelShape
    from pipeline.planning.shapes import OptimizerShape as OptimizerShape
    from pipeline.planning.shapes import SampleShape as SampleShape
    from pipeline.planning.shapes import Sizes as Sizes
    from pipeline.planning.shapes import Step as Step
    from pipeline.planning.shapes import Topology as Topology
    from pipeline.planning.shapes import Weight as Weight
    from pipeline.planning.trace.compile_compat import traced_backend as traced_backend
    from pipeline.recipe.dump import reads_back as reads_back
else:
    __getattr__, __dir__ = lazily(__name__, __file__)
