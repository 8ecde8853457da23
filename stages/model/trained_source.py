"""The model of a training as a source, for `model.trained`."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline import ModelSource, StageError, TensorReader, Weights
from pipeline.checkpoint import Reading, open_state
from stages.consolidate.weights import open_weights, state_files
from stages.data.sources import file_digests
from stages.model.as_exported import module_tensors, needs_source, require_same_base
from stages.model.declared import DerivedSource, completed, ties
from stages.weights.change import renamed
from stages.weights.converted import ConvertedReader

if TYPE_CHECKING:
    from pipeline import Context, TrainedRun
    from stages.model.trained import TrainedModel


def open_trained_source(
    stage: TrainedModel, ctx: Context, trained: TrainedRun, model: ModelSource
) -> TrainedSource:
    """The model of a finished training of `model`. Raises StageError for another model, and for
    other weights than an adapter was trained on."""
    then = trained.progress.lineage.get("model")
    if then not in (None, model.fingerprint) and "model" not in ctx.accept:
        raise StageError(
            f"{model.name} is not the model that was trained: it was {then[:12]}, is "
            f"{model.fingerprint[:12]}",
            hint="the slot takes the latest model before it: put it after the training that it is "
            "to continue, and another model after it",
        )
    require_same_base(ctx, model, trained)
    source = TrainedSource(stage, model, trained.checkpoint, verify=ctx.dist.is_main)
    source.name = f"{model.name} trained to step {trained.progress.step}"
    ctx.log.info("the model of step %d, from %s", trained.progress.step, trained.checkpoint)
    return source


class TrainedSource(DerivedSource):
    """The model that a training made of `origin`, without its adapters. Checkpoints are opened when
    something is read."""

    def __init__(
        self, stage: TrainedModel, origin: ModelSource, checkpoint: str, *, verify: bool
    ) -> None:
        super().__init__(origin.training_view)
        self._stage, self._origin, self._checkpoint = stage, origin, checkpoint
        self._verify = verify
        """Whether to compare the checksums of whole files, which happens once."""

    def weights(self) -> TensorReader:
        with contextlib.ExitStack() as held:
            opened = open_weights(
                self._checkpoint, verify=self._verify, average=self._stage.average
            )
            held.callback(opened.close)
            merged = self._origin.merge_trained(opened)
            if merged is not opened:
                held.callback(merged.close)
            model, tensors = module_tensors(self._origin.export_view, merged, self._stage.dtype)
            self._verify = False
            return _Opened(tensors, ties(model), held.pop_all().close)

    def merge_trained(self, trained: Weights) -> Weights:
        return super().merge_trained(completed(self, trained))

    @functools.cached_property
    def _identity(self) -> str:
        """Digest of the weights that are read, the same wherever the checkpoint lies."""
        opened = open_weights(self._checkpoint, verify=False, average=self._stage.average)
        with contextlib.closing(opened):
            return opened.identity

    @functools.cached_property
    def fingerprint(self) -> str:
        facts = f"{self._origin.fingerprint} trained {self._identity} {self._stage.dtype}"
        return hashlib.sha256(facts.encode()).hexdigest()

    @property
    def sampled_contents(self) -> str | None:
        return self._identity

    @functools.cached_property
    def contents(self) -> str | None:
        reading = Reading(weights_only=True, verify=False)
        with contextlib.closing(open_state(self._checkpoint, reading)) as state:
            written = state.digest()
        read = [written] if written else file_digests(state_files(self._checkpoint))
        if needs_source(self._origin):
            read.append(str(self._origin.contents))
        return hashlib.sha256("\n".join(read).encode()).hexdigest()

    @property
    def location(self) -> str | None:
        return None

    @property
    def revision(self) -> str | None:
        return None

    @property
    def inference_view(self) -> ModelSource:
        same = copy.copy(self)
        same.base = self.base.inference_view
        return same

    @property
    def export_view(self) -> ModelSource:
        return self.inference_view

    @property
    def training_view(self) -> ModelSource:
        return self

    @property
    def skeleton(self) -> ModelSource:
        return self.base.skeleton


class _Opened(ConvertedReader):
    """Tensors of `base`, tied ones under each of their names; `close` closes what they come
    from."""

    def __init__(
        self, base: TensorReader, tied: dict[str, str], close: Callable[[], object]
    ) -> None:
        names = {name: name for name in base.names()}
        names |= {alias: kept for alias, kept in tied.items() if kept in names}
        super().__init__(base, [renamed(kept, name) for name, kept in names.items()])
        self._closes = close

    def close(self) -> None:
        super().close()
        self._closes()
