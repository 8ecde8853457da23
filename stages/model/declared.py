"""Helpers of model sources: a module without memory, its ties, tolerated differences of weights,
and the base of sources that change another one."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import ModelSource, Scorer, StageError, TensorReader, Weights
from stages.model import compat

if TYPE_CHECKING:
    from torch import nn


SHOWN = 10
WAYS_OUT = (
    "declare intended differences in the model slot: new_weights, unused_weights (a pattern, and "
    "pass_through or drop), vocab_size"
)


def ties(model: nn.Module) -> dict[str, str]:
    """Every name that shares its tensor with another -> the name that files keep.

    `model` has its weights tied. The kept name is the source that the architecture declares
    (usually the input embedding), or the first in the state dict.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    sources = set(compat.declared_ties(model).values())
    tied = {}
    for names in groups.values():
        kept = next((name for name in names if name in sources), names[0])
        tied.update({name: kept for name in names if name != kept})
    return tied


def logical_numel(model: nn.Module) -> dict[str, int]:
    """Name of each parameter that holds a packed weight -> elements of that weight. A module lists
    its own parameters in an attribute of this name."""
    return {
        f"{owner}.{leaf}": elements
        for owner, module in model.named_modules()
        for leaf, elements in getattr(module, "logical_numel", {}).items()
    }


def refuse_differences(
    where: str,
    model: nn.Module,
    missing: Iterable[str],
    unexpected: Collection[str] | str,
    misshapen: Collection[str] = (),
) -> None:
    """Raise StageError that lists the differences, except missing ones that the architecture
    tolerates.

    `misshapen` are sentences of `misfit`, `unexpected` names or sentences about several.
    """
    tolerated = compat.may_lack(model)
    lacking = [name for name in missing if not any(one.search(name) for one in tolerated)]
    found = {"missing": lacking, "of another shape": misshapen}
    parts = [f"{kind} {listed(names)}" for kind, names in found.items() if names]
    extra = unexpected if isinstance(unexpected, str) else listed(list(unexpected))
    if unexpected:
        parts.insert(bool(lacking), f"unexpected {extra}")
    if parts:
        raise StageError(
            f"the weights in {where} do not fit {type(model).__name__}: {'; '.join(parts)}",
            hint=WAYS_OUT,
        )


def misfit(name: str, found: Sequence[int], needed: Sequence[int]) -> str:
    """Shapes that differ, as in `name 4x3 instead of 5x3`."""
    shapes = ("x".join(map(str, shape)) or "scalar" for shape in (found, needed))
    return f"{name} {' instead of '.join(shapes)}"


def listed(names: Collection[str]) -> str:
    """Number and names, as in `3 tensors (a, b, c)`; names after the tenth are left out."""
    shown = sorted(names)[:SHOWN]
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} tensor{'s' * (len(names) != 1)} ({', '.join(shown)}{more})"


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def refuse_idle(key: str, patterns: Iterable[str], names: Collection[str], what: str) -> None:
    """Raise StageError for a pattern in the field `key` that matches none of the names, which is a
    spelling mistake."""
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            shown = dict.fromkeys([*get_close_matches(pattern, names, 1), *sorted(names)[-3:]])
            raise StageError(
                f"{key}: {pattern!r} matches no {what}",
                hint=f"they are called {', '.join(shown)}, ...",
            )


def without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """A module that `build` makes, with parameters on the meta device and real buffers."""
    from accelerate import init_empty_weights

    from stages.model.no_values import NoValues, beside_parameters

    with NoValues(), init_empty_weights(include_buffers=False):
        model = build()
    if any(tensor.is_meta for tensor in beside_parameters(model)):
        with init_empty_weights(include_buffers=False):  # tensors that are filled later
            model = build()
    return model


def outline(source: ModelSource) -> nn.Module:
    """The source's module: parameters on the meta device, real buffers, weights tied."""
    model = without_memory(source.build)
    source.tie(model)
    return model


def completed(source: ModelSource, trained: Weights) -> Weights:
    """The weights of a checkpoint, with the frozen ones that it leaves out from `source`."""
    from stages.weights.views import CompletedWeights

    frozen = set(source.frozen_base)
    lacking = frozen and frozen - set(trained.names())
    return CompletedWeights(trained, source.weights(), lacking) if lacking else trained


class DerivedSource(ModelSource):
    """Everything as in `base`; a subclass changes some of it."""

    def __init__(self, base: ModelSource) -> None:
        self.base = base
        self.name = base.name

    def build(self) -> nn.Module:
        return self.base.build()

    def weights(self) -> TensorReader:
        return self.base.weights()

    def tie(self, model: nn.Module) -> None:
        self.base.tie(model)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return self.base.blocks(model)

    def tower_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return self.base.tower_blocks(model)

    def ends(self, model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
        return self.base.ends(model)

    def external_parameter_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        return self.base.external_parameter_modules(model)

    def compiled_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        return self.base.compiled_modules(model)

    @property
    def compiled_by(self) -> str | None:
        return self.base.compiled_by

    def tokenizer(self) -> Any:
        return self.base.tokenizer()

    def processor(self) -> Any | None:
        return self.base.processor()

    def scorer(self, model: nn.Module, **how: Any) -> Scorer:
        return self.base.scorer(model, **how)

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def most_positions(self) -> int | None:
        return self.base.most_positions

    @property
    def fingerprint(self) -> str:
        return self.base.fingerprint

    @property
    def sampled_contents(self) -> str | None:
        return self.base.sampled_contents

    @property
    def contents(self) -> str | None:
        return self.base.contents

    @property
    def location(self) -> str | None:
        return self.base.location

    @property
    def revision(self) -> str | None:
        return self.base.revision

    @property
    def frozen_base(self) -> Collection[str]:
        return self.base.frozen_base

    @property
    @abstractmethod
    def inference_view(self) -> ModelSource:
        """The same on top of the base's inference view."""

    @property
    def export_view(self) -> ModelSource:
        return self.base.export_view

    @property
    def training_view(self) -> ModelSource:
        return self.base.training_view

    def merge_trained(self, trained: Weights) -> Weights:
        return self.base.merge_trained(trained)

    def passed_through(self) -> TensorReader | None:
        return self.base.passed_through()

    def save_assets(self, folder: Path, *, dtype: str) -> None:
        self.base.save_assets(folder, dtype=dtype)


class FrozenSource(DerivedSource):
    """The model of another source, of which nothing is trained."""

    def build(self) -> nn.Module:
        return self.base.build().requires_grad_(requires_grad=False)

    @functools.cached_property
    def frozen_base(self) -> Collection[str]:
        return [name for name, _ in outline(self.base).named_parameters()]

    @property
    def inference_view(self) -> ModelSource:
        return self.base.inference_view
