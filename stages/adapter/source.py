"""A model with trainable updates, as a model source."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import ModelSource, StageError, TensorReader, Weights
from pipeline.utils import plural
from stages.adapter.compat import CONFIG, WEIGHTS, Layer
from stages.adapter.experts import updated_modules
from stages.adapter.injection import inject, layers, log_left_out
from stages.adapter.peft_files import changes_to_file, save_config, saved_updates
from stages.adapter.settings import AdaptedModel, LoraSettings
from stages.adapter.updates import InitialValues, MergedWeights
from stages.model.declared import outline, ties
from stages.weights.converted import Change, ConvertedReader, renamed
from stages.weights.files import sampled
from stages.weights.views import JoinedReader

if TYPE_CHECKING:
    from torch import nn

NUMBERED = frozenset("0123456789?[")
"""Characters of names and patterns that may mean one block and not another."""


class AdaptedSource(AdaptedModel):
    """`base` with updates of some of its linear layers and experts."""

    def __init__(self, stage: LoraSettings, base: ModelSource, *, seed: int) -> None:
        super().__init__(base)
        self.stage = stage
        self.quantize = stage.quantize
        self._seed = seed

    def build(self) -> nn.Module:
        model = self.base.build()
        inject(self.stage, model)
        return model

    @functools.cached_property
    def outline(self) -> nn.Module:
        """The module with updates, on the meta device."""
        return outline(self)

    def tie(self, model: nn.Module) -> None:
        for layer in layers(model):
            if layer.weight in self._shared:
                raise StageError(
                    f"adapter.lora: {layer.name} shares its weight with another module, so an "
                    "update of it cannot be merged",
                    hint="leave it out of `targets`",
                )
        self.base.tie(model)

    @functools.cached_property
    def _shared(self) -> Collection[str]:
        shared = ties(outline(self.base))
        return {*shared, *shared.values()}

    def external_parameter_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        within = [model.get_submodule(layer.name) for layer in layers(model) if layer.dora]
        experts = updated_modules(model)
        return [*within, *experts, *self.base.external_parameter_modules(model)]

    @functools.cached_property
    def layers(self) -> Sequence[Layer]:
        """Layers and stacked weights of experts that have an update."""
        return layers(self.outline)

    @functools.cached_property
    def trained(self) -> Sequence[str]:
        return [name for name, one in self.outline.named_parameters() if one.requires_grad]

    def log_summary(self, log: logging.Logger) -> None:
        """Log the number of trained parameters and what gets no update."""
        parameters = dict(self.outline.named_parameters())
        trained = sum(parameters[name].numel() for name in self.trained)
        stacked = sum(layer.experts is not None for layer in self.layers)
        also = f" and {plural(stacked, 'stack')} of experts" if stacked else ""
        log.info(
            "%s%s get updates; %s parameters are trained",
            plural(len(self.layers) - stacked, "layer"), also, f"{trained:,}",
        )  # fmt: skip
        log_left_out(self.stage, self.outline, self.layers, log)

    def save_config(self, folder: Path) -> None:
        base, revision = self.location, self.revision
        save_config(self.stage, folder, self.outline, self.layers, base=base, revision=revision)

    def changes_to_file(self) -> Sequence[Change]:
        return list(changes_to_file(self.trained, self.layers))

    @functools.cached_property
    def frozen_base(self) -> Collection[str]:
        named = self.outline.named_parameters(remove_duplicate=False)
        return frozenset(name for name, parameter in named if not parameter.requires_grad)

    @property
    def inference_view(self) -> ModelSource:
        return AdaptedSource(self.stage, self.base.inference_view, seed=self._seed)

    @property
    def skeleton(self) -> ModelSource:
        stage = self.stage
        named = (*stage.train_also, *stage.targets, *(stage.target_parameters or ()))
        return self if any(NUMBERED & set(name) for name in named) else self.base.skeleton

    def weights(self) -> TensorReader:
        base = self.base.weights()
        adapted = {layer.name for layer in self.layers if layer.experts is None}
        changes = []
        for name in base.names():
            owner, _, leaf = name.rpartition(".")
            new = f"{owner}.base_layer.{leaf}" if owner in adapted else name
            changes.append(renamed(name, new))
        # Parameters that were trained as a whole come from the saved adapter, not from the model.
        return JoinedReader(self._updates(), ConvertedReader(base, changes))

    def _updates(self) -> TensorReader:
        if self.stage.start_from is None:
            return InitialValues(self.layers, self.base.inference_view.weights, seed=self._seed)
        folder = Path(self.stage.start_from).expanduser()
        return saved_updates(folder, self.outline, self.trained, self.layers)

    @property
    def fingerprint(self) -> str:
        fields = dataclasses.asdict(self.stage)
        if self.stage.target_parameters is None:  # as before there were any
            del fields["target_parameters"]
        settings = json.dumps(fields, sort_keys=True)
        facts = f"{self.base.fingerprint} lora {settings} {self._seed}"
        return hashlib.sha256(facts.encode()).hexdigest()

    @functools.cached_property
    def sampled_contents(self) -> str | None:
        base = self.base.sampled_contents
        if self.stage.start_from is None:
            return base
        # what the updates begin with is no part of the fingerprint, which old runs know
        folder = Path(self.stage.start_from).expanduser()
        own = sampled([folder / WEIGHTS, folder / CONFIG])
        return hashlib.sha256(f"{base} {own}".encode()).hexdigest()

    def merge_trained(self, trained: Weights) -> Weights:
        merged = MergedWeights(
            trained, self.base.inference_view.weights(), self.layers, self.fingerprint
        )
        return self.base.merge_trained(merged)
