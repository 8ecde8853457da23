"""Parts that model sources share: a module without memory, its ties, tolerated differences of
weights, and the base of sources that change another one."""

from __future__ import annotations

import functools
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pipeline import ModelSource, StageError, Weights

if TYPE_CHECKING:
    from torch import nn

SHOWN = 10
WAYS_OUT = (
    "declare intended differences in the model slot: new_weights, unused_weights (a pattern, and "
    "pass_through or drop), vocab_size"
)


def outline(source: ModelSource) -> nn.Module:
    """Return the source's module: parameters on the meta device, real buffers, weights tied."""
    model = without_memory(source.build)
    source.tie(model)
    return model


def without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a module that `build` makes, with parameters on the meta device and real buffers."""
    import torch
    from accelerate import init_empty_weights
    from torch.overrides import TorchFunctionMode

    class NoValues(TorchFunctionMode):
        """Makes tensors without values on the meta device: `init_empty_weights` moves parameters
        there only once they are made, and one may be larger than this machine's memory."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            if func is torch.empty and given.get("device") is None and given.get("out") is None:
                given["device"] = torch.device("meta")
            return func(*args, **given)

    with NoValues(), init_empty_weights(include_buffers=False):
        model = build()
    attributes = (each for module in model.modules() for each in vars(module).values())
    others = (*model.buffers(), *(each for each in attributes if isinstance(each, torch.Tensor)))
    if any(tensor.is_meta for tensor in others):
        with init_empty_weights(include_buffers=False):  # tensors that are filled later
            model = build()
    return model


def ties(model: nn.Module) -> dict[str, str]:
    """Return every name that shares its tensor with another -> the name that files keep.

    `model` has its weights tied. The kept name is the source that the architecture declares
    (usually the input embedding), or the first in the state dict.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    owner: Any = model
    sources = set(owner.get_expanded_tied_weights_keys(all_submodels=True).values())
    tied = {}
    for names in groups.values():
        kept = next((name for name in names if name in sources), names[0])
        tied.update({name: kept for name in names if name != kept})
    return tied


def logical_numel(model: nn.Module) -> dict[str, int]:
    """Return packed weights -> their elements, by the attribute of this name of modules."""
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
    tolerated = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    lacking = [name for name in missing if not any(re.search(one, name) for one in tolerated)]
    extra = unexpected if isinstance(unexpected, str) else listed(list(unexpected))
    found = {
        "missing": listed(lacking) if lacking else "",
        "unexpected": extra if unexpected else "",
        "of another shape": listed(misshapen) if misshapen else "",
    }
    parts = [f"{kind} {names}" for kind, names in found.items() if names]
    if parts:
        raise StageError(
            f"the weights in {where} do not fit {type(model).__name__}: {'; '.join(parts)}",
            hint=WAYS_OUT,
        )


def misfit(name: str, found: Sequence[int], needed: Sequence[int]) -> str:
    """Return shapes that differ, as in `name 4x3 instead of 5x3`."""
    shapes = ("x".join(map(str, shape)) or "scalar" for shape in (found, needed))
    return f"{name} {' instead of '.join(shapes)}"


def listed(names: Collection[str]) -> str:
    """Return number and names, as in `3 tensors (a, b, c)`; names after the tenth are left out."""
    shown = sorted(names)[:SHOWN]
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} tensor{'s' * (len(names) != 1)} ({', '.join(shown)}{more})"


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def refuse_idle(key: str, patterns: Iterable[str], names: Collection[str], what: str) -> None:
    """Raise StageError for a pattern in the field `key` that matches none of the names."""
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            shown = dict.fromkeys([*get_close_matches(pattern, names, 1), *sorted(names)[-3:]])
            raise StageError(
                f"{key}: {pattern!r} matches no {what}",
                hint=f"they are called {', '.join(shown)}, ...",
            )


def completed(source: ModelSource, trained: Weights) -> Weights:
    """Return the weights of a checkpoint, with the frozen ones that it leaves out from `source`."""
    from stages.weights.views import CompletedWeights

    frozen = set(source.frozen_base)
    lacking = frozen and frozen - set(trained.names())
    return CompletedWeights(trained, source.weights(), lacking) if lacking else trained


def of_base(name: str) -> Any:
    """Return a property with the value of the same one of `base`."""
    return property(lambda source: getattr(source.base, name))


class DerivedSource(ModelSource):
    """Everything as in `base`; a subclass changes some of it."""

    def __init__(self, base: ModelSource) -> None:
        self.base = base
        self.name = base.name

    build = of_base("build")
    weights = of_base("weights")
    tie = of_base("tie")
    blocks = of_base("blocks")
    tower_blocks = of_base("tower_blocks")
    ends = of_base("ends")
    external_parameter_modules = of_base("external_parameter_modules")
    compiled_modules = of_base("compiled_modules")
    compiled_by = of_base("compiled_by")
    tokenizer = of_base("tokenizer")
    processor = of_base("processor")
    scorer = of_base("scorer")
    vocab_size = of_base("vocab_size")
    most_positions = of_base("most_positions")
    fingerprint = of_base("fingerprint")
    sampled_contents = of_base("sampled_contents")
    contents = of_base("contents")
    location = of_base("location")
    revision = of_base("revision")
    frozen_base = of_base("frozen_base")
    export_view = of_base("export_view")
    training_view = of_base("training_view")
    merge_trained = of_base("merge_trained")
    passed_through = of_base("passed_through")
    save_assets = of_base("save_assets")

    @property
    @abstractmethod
    def inference_view(self) -> ModelSource:
        """The same on top of the base's inference view."""


class FrozenSource(DerivedSource):
    """The model of another source, without anything that is trained."""

    def build(self) -> nn.Module:
        return self.base.build().requires_grad_(requires_grad=False)

    @functools.cached_property
    def frozen_base(self) -> Collection[str]:
        return [name for name, _ in outline(self.base).named_parameters()]

    inference_view = of_base("inference_view")
