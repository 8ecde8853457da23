"""The framework, and the door for programs that run recipes (`run`, `resume`, `check`, `plan`) and
for authors of stages: a stage imports all it needs from here.

Further doors: `pipeline.planning` (planners), `pipeline.checkpoint` (formats of training state),
`pipeline.importing` (translators), `pipeline.track` (trackers), `pipeline.testing` (tests of a
stage), `pipeline.hardware` and `pipeline.utils`. Names are imported from their modules when they
are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.packages import lazily

if TYPE_CHECKING:
    from pipeline.api import RunOutcome as RunOutcome
    from pipeline.api import check as check
    from pipeline.api import plan as plan
    from pipeline.api import resume as resume
    from pipeline.api import run as run
    from pipeline.contracts import traits as traits
    from pipeline.contracts.callbacks import Callbacks as Callbacks
    from pipeline.contracts.callbacks import StepCallback as StepCallback
    from pipeline.contracts.data import NO_TARGET as NO_TARGET
    from pipeline.contracts.data import Data as Data
    from pipeline.contracts.data import MicroBatch as MicroBatch
    from pipeline.contracts.data import Sample as Sample
    from pipeline.contracts.data import Samples as Samples
    from pipeline.contracts.engine import WEIGHT as WEIGHT
    from pipeline.contracts.engine import DataAxis as DataAxis
    from pipeline.contracts.engine import Engine as Engine
    from pipeline.contracts.engine import EngineState as EngineState
    from pipeline.contracts.engine import Fragment as Fragment
    from pipeline.contracts.engine import LossScale as LossScale
    from pipeline.contracts.engine import ParameterGroup as ParameterGroup
    from pipeline.contracts.engine import StepGuard as StepGuard
    from pipeline.contracts.engine import StepReport as StepReport
    from pipeline.contracts.export import EXPORT_MANIFEST as EXPORT_MANIFEST
    from pipeline.contracts.export import ExportedModel as ExportedModel
    from pipeline.contracts.export import Message as Message
    from pipeline.contracts.export import OpensText as OpensText
    from pipeline.contracts.export import TextModel as TextModel
    from pipeline.contracts.export import Writing as Writing
    from pipeline.contracts.export import Written as Written
    from pipeline.contracts.model import ModelSource as ModelSource
    from pipeline.contracts.model import TensorReader as TensorReader
    from pipeline.contracts.model import TensorSpec as TensorSpec
    from pipeline.contracts.model import Weights as Weights
    from pipeline.contracts.objective import LossParts as LossParts
    from pipeline.contracts.objective import Measure as Measure
    from pipeline.contracts.objective import Objective as Objective
    from pipeline.contracts.objective import Scorer as Scorer
    from pipeline.contracts.objective import ScoreRequest as ScoreRequest
    from pipeline.contracts.objective import Scores as Scores
    from pipeline.contracts.objective import Unit as Unit
    from pipeline.contracts.optimizer import DtypeName as DtypeName
    from pipeline.contracts.optimizer import LossScaling as LossScaling
    from pipeline.contracts.optimizer import NamedParameter as NamedParameter
    from pipeline.contracts.optimizer import OptimizerPart as OptimizerPart
    from pipeline.contracts.optimizer import OptimizerPlan as OptimizerPlan
    from pipeline.contracts.optimizer import Precision as Precision
    from pipeline.contracts.optimizer import StateCodec as StateCodec
    from pipeline.contracts.optimizer import UpdateRule as UpdateRule
    from pipeline.contracts.optimizer import WholeMatrices as WholeMatrices
    from pipeline.contracts.optimizer import dtype_name as dtype_name
    from pipeline.contracts.optimizer import torch_dtype as torch_dtype
    from pipeline.contracts.plan_view import Checked as Checked
    from pipeline.contracts.plan_view import PlanView as PlanView
    from pipeline.contracts.plan_view import Wiring as Wiring
    from pipeline.contracts.sample_order import ENDLESS as ENDLESS
    from pipeline.contracts.sample_order import Order as Order
    from pipeline.contracts.sample_order import SampleOrder as SampleOrder
    from pipeline.contracts.stage import ENGINE_FILE as ENGINE_FILE
    from pipeline.contracts.stage import ENVIRONMENT_FILE as ENVIRONMENT_FILE
    from pipeline.contracts.stage import Context as Context
    from pipeline.contracts.stage import DividesRanks as DividesRanks
    from pipeline.contracts.stage import Durable as Durable
    from pipeline.contracts.stage import NeedsResources as NeedsResources
    from pipeline.contracts.stage import ResourceNeed as ResourceNeed
    from pipeline.contracts.stage import RunsDry as RunsDry
    from pipeline.contracts.stage import Stage as Stage
    from pipeline.contracts.stage import VerifiesResult as VerifiesResult
    from pipeline.contracts.training import Checkpoints as Checkpoints
    from pipeline.contracts.training import Progress as Progress
    from pipeline.contracts.training import TrainedRun as TrainedRun
    from pipeline.contracts.training import TrainingLength as TrainingLength
    from pipeline.contracts.training import WrittenCheckpoint as WrittenCheckpoint
    from pipeline.contracts.training import ends_period as ends_period
    from pipeline.distributed.environment import worker_rank as worker_rank
    from pipeline.distributed.heartbeat import Heartbeat as Heartbeat
    from pipeline.distributed.heartbeat import Phase as Phase
    from pipeline.distributed.process_group import DistContext as DistContext
    from pipeline.errors import BadRows as BadRows
    from pipeline.errors import CheckpointError as CheckpointError
    from pipeline.errors import DataError as DataError
    from pipeline.errors import EngineMismatch as EngineMismatch
    from pipeline.errors import ExportError as ExportError
    from pipeline.errors import PipeError as PipeError
    from pipeline.errors import Problem as Problem
    from pipeline.errors import RecipeError as RecipeError
    from pipeline.errors import ResumeRefused as ResumeRefused
    from pipeline.errors import RunFailed as RunFailed
    from pipeline.errors import RunStopped as RunStopped
    from pipeline.errors import StageError as StageError
    from pipeline.errors import UsageError as UsageError
    from pipeline.errors import in_words as in_words
    from pipeline.errors import system_errors_as as system_errors_as
    from pipeline.execution.rank_logging import IN_DISPLAY as IN_DISPLAY
else:
    __getattr__, __dir__ = lazily(__name__, __file__)
