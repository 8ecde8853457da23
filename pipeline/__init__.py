"""The framework, and the door for programs that run recipes (`run`, `resume`, `check`, `plan`) and
for authors of stages: a stage imports all it needs from here.

Further doors: `pipeline.planning` (planners), `pipeline.checkpoint` (formats of training state),
`pipeline.importing` (translators), `pipeline.track` (trackers), `pipeline.testing` (tests of a
stage), `pipeline.hardware` and `pipeline.utils`. Names are imported from their modules when they
are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.lazy import lazily

if TYPE_CHECKING:
    from pipeline.api import RunOutcome, check, plan, resume, run
    from pipeline.contracts.data import NO_TARGET, Data, MicroBatch, Sample, Samples
    from pipeline.contracts.engine import (
        WEIGHT,
        DataAxis,
        Engine,
        EngineState,
        Fragment,
        LossScale,
        Objective,
        ParameterGroup,
        StepGuard,
        StepReport,
    )
    from pipeline.contracts.export import EXPORT_MANIFEST, ExportedModel
    from pipeline.contracts.model import ModelSource
    from pipeline.contracts.optimizer import NamedParameter, OptimizerPlan, StateCodec
    from pipeline.contracts.precision import (
        DtypeName,
        LossScaling,
        Precision,
        dtype_name,
        torch_dtype,
    )
    from pipeline.contracts.resources import ResourceNeed
    from pipeline.contracts.sample_order import ENDLESS, Order, SampleOrder
    from pipeline.contracts.stage import (
        ENGINE_FILE,
        ENVIRONMENT_FILE,
        Checked,
        Context,
        DividesRanks,
        Durable,
        NeedsResources,
        PlanView,
        RunsDry,
        Stage,
        VerifiesResult,
    )
    from pipeline.contracts.tensors import TensorReader, TensorSpec, Weights
    from pipeline.contracts.text_model import Message, OpensText, TextModel, Writing, Written
    from pipeline.contracts.training import (
        Callbacks,
        Checkpoints,
        Progress,
        StepCallback,
        TrainedRun,
        TrainingLength,
        WrittenCheckpoint,
        ends_period,
    )
    from pipeline.distributed.environment import worker_rank
    from pipeline.distributed.heartbeat import Heartbeat, Phase
    from pipeline.distributed.process_group import DistContext
    from pipeline.errors import (
        BadRows,
        CheckpointError,
        DataError,
        EngineMismatch,
        ExportError,
        PipeError,
        Problem,
        RecipeError,
        ResumeRefused,
        RunFailed,
        RunStopped,
        StageError,
        UsageError,
        in_words,
        system_errors_as,
    )
    from pipeline.execution.rank_logging import IN_DISPLAY
else:
    __getattr__ = lazily(__name__, __file__)
