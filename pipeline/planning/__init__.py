"""`pipe plan` and `pipe advise`: memory and time of a recipe, before anything is rented.

This is also the door for authors of planners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.lazy import lazily

if TYPE_CHECKING:
    from pipeline.planning.advise import AdviceRequest
    from pipeline.planning.forecast import (
        BACKWARD,
        BUFFERS,
        EXPORT,
        FORWARD,
        GATHERED,
        GRADIENTS,
        IN_BACKWARD,
        LOADED,
        OPTIMIZER,
        PARAMETERS,
        RESUME,
        SAVE,
        UPDATE,
        UPDATE_TEMPORARIES,
        WHOLE_GRADIENTS,
        Collective,
        Copies,
        Extra,
        Gradients,
        Item,
        Kind,
        Moment,
        Pass,
        PipelineRank,
        PipelineStage,
        Place,
        StrategyMemory,
        Traffic,
        Unit,
    )
    from pipeline.planning.planner import (
        AWAY,
        CHUNK,
        NARROW_FROZEN,
        NARROW_MASTERS,
        NARROW_MOMENTS,
        RECOMPUTE,
        REDUCE,
        SMALLER,
        Planner,
        Preset,
        Presets,
        Saving,
        Tier,
        TraceScope,
        Trial,
    )
    from pipeline.planning.profile import Profile
    from pipeline.planning.shapes import (
        BYTES,
        ModelShape,
        OptimizerShape,
        SampleShape,
        Sizes,
        Step,
        Weight,
    )
    from pipeline.planning.topology import Division, Topology
    from pipeline.planning.trace.compile_compat import traced_backend
    from pipeline.recipe.written import reads_back
else:
    __getattr__ = lazily(__name__, __file__)
