"""A trained model's tensors as an export has them, and as a source for a further training."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
from typing import TYPE_CHECKING

import torch

from pipeline import (
    Context,
    ExportError,
    ModelSource,
    TensorReader,
    TrainedRun,
    Weights,
    torch_dtype,
)
from pipeline.checkpoint import Reading, open_state
from stages.consolidate.stream import open_weights, state_files
from stages.digests import file_digests
from stages.model.declared import (
    DerivedSource,
    completed,
    misfit,
    of_base,
    outline,
    refuse_differences,
    ties,
)
from stages.weights.converted import ConvertedReader, renamed
from stages.weights.views import cast_reader

if TYPE_CHECKING:
    from torch import nn

    from pipeline import DtypeName

AS_SOURCE = "source"
"""Instead of a dtype: each tensor keeps the source's."""


def module_tensors(
    source: ModelSource, weights: TensorReader, dtype: DtypeName | str
) -> tuple[nn.Module, TensorReader]:
    """Return the source's module on the meta device, and its tensors by its names, in `dtype` of an
    export or AS_SOURCE; a tied tensor once, under the name that files keep. Raises StageError when
    names or shapes differ."""
    model = outline(source)
    tied = ties(model)
    given = set(weights.names())
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    read: dict[str, str] = {}
    for name in expected:
        kept = tied.get(name, name)
        if name in given and (kept not in read or name == kept):
            read[kept] = name
    missing = {name for name in expected if tied.get(name, name) not in read}
    shapes = {kept: weights.spec(name).shape for kept, name in read.items()}
    misshapen = [misfit(n, has, expected[n]) for n, has in shapes.items() if has != expected[n]]
    refuse_differences("the checkpoint", model, missing, given - expected.keys(), misshapen)
    changes = [renamed(read[name], name) for name in expected if name in read]
    chosen = ConvertedReader(weights, changes)
    if dtype != AS_SOURCE:
        one = torch_dtype(dtype)
        return model, cast_reader(chosen, lambda name: one)
    with contextlib.closing(source.weights()) as reader:
        own: dict[str, torch.dtype] = {name: reader.spec(name).dtype for name in reader.names()}
    own |= {kept: own[alias] for alias, kept in tied.items() if kept not in own}
    return model, cast_reader(chosen, own.__getitem__)


def require_same_base(
    ctx: Context,
    model: ModelSource,
    trained: TrainedRun,
    otherwise: str = "if that is intended: --accept weights",
) -> None:
    """Raise ExportError when weights that come from the model's source are not those that were
    trained on; its hint ends with what may be done `otherwise`."""
    then = trained.progress.lineage.get("weights")
    if not needs_source(model) or then is None or "weights" in ctx.accept:
        return
    if model.contents != then:
        raise ExportError(
            f"the weights of {model.name} are not those that were trained on: their digest was "
            f"{then[:12]}, is {str(model.contents)[:12]}",
            hint=f"put back the files, or {otherwise}",
        )


def needs_source(model: ModelSource) -> bool:
    """Whether tensors of the model's source are exported or merged."""
    passed = model.export_view.passed_through()
    if passed is not None:
        passed.close()
    return passed is not None or bool(model.frozen_base)


class TrainedSource(DerivedSource):
    """The model that a training made of `model`, without its adapters, opened when it is read."""

    def __init__(
        self, model: ModelSource, trained: TrainedRun, ctx: Context, dtype: str, average: str | None
    ) -> None:
        super().__init__(model.training_view)
        self.name = f"{model.name} trained to step {trained.progress.step}"
        self._origin, self._checkpoint = model, trained.checkpoint
        self._dtype, self._average = dtype, average
        self._verify = ctx.dist.is_main
        """Whether to compare the checksums of whole files, which happens once."""

    def weights(self) -> TensorReader:
        with contextlib.ExitStack() as held:
            opened = open_weights(self._checkpoint, verify=self._verify, average=self._average)
            held.callback(opened.close)
            merged = self._origin.merge_trained(opened)
            if merged is not opened:
                held.callback(merged.close)
            model, tensors = module_tensors(self._origin.export_view, merged, self._dtype)
            names = {name: name for name in tensors.names()}
            names |= {alias: kept for alias, kept in ties(model).items() if kept in names}
            self._verify = False
            found = ConvertedReader(tensors, [renamed(kept, name) for name, kept in names.items()])
            found.closes = [tensors, held.pop_all()]
            return found

    def merge_trained(self, trained: Weights) -> Weights:
        merged: Weights = super().merge_trained(completed(self, trained))
        return merged

    @functools.cached_property
    def sampled_contents(self) -> str | None:
        """Digest of the weights that are read, the same wherever the checkpoint lies."""
        opened = open_weights(self._checkpoint, verify=False, average=self._average)
        with contextlib.closing(opened):
            return opened.identity

    @functools.cached_property
    def fingerprint(self) -> str:
        facts = f"{self._origin.fingerprint} trained {self.sampled_contents} {self._dtype}"
        return hashlib.sha256(facts.encode()).hexdigest()

    @functools.cached_property
    def contents(self) -> str | None:
        reading = Reading(weights_only=True, verify=False)
        with contextlib.closing(open_state(self._checkpoint, reading)) as state:
            written = state.digest()
        read = [written] if written else file_digests(state_files(self._checkpoint))
        if needs_source(self._origin):
            read.append(str(self._origin.contents))
        return hashlib.sha256("\n".join(read).encode()).hexdigest()

    location = None
    revision = None
    export_view = ModelSource.export_view
    training_view = ModelSource.training_view
    skeleton = of_base("skeleton")

    @property
    def inference_view(self) -> ModelSource:
        same = copy.copy(self)
        same.base = self.base.inference_view
        return same
