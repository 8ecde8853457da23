"""Undocumented parts of peft and bitsandbytes, and the names of updates in the module and in peft's
files; contract tests guard them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.utils import optional
from stages.model.compat import replaced


def import_peft() -> Any:
    """peft, without its messages about optional packages."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        bitsandbytes()  # which peft would import, with all that comes with it
    with optional("adapter.lora needs peft", hint="pip install 'pipetrain[adapter]'"):
        import peft
    return peft


@functools.cache
def bitsandbytes() -> Any:
    """bitsandbytes, without its messages about missing kernels, and without the kernels that it
    would fetch from the hub when it is imported."""
    kernels = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        hint = "pip install 'pipetrain[bitsandbytes]'"
        with optional("quantize needs bitsandbytes", hint=hint):
            import bitsandbytes
    finally:
        del sys.modules["kernels"]
        if kernels is not None:
            sys.modules["kernels"] = kernels
    return bitsandbytes


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence peft's advice, and the warnings of the parts of transformers that it calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextlib.contextmanager
def only_declared() -> Iterator[None]:
    """Have peft, in the body, put updates where it is told to, and leave DoRA's magnitudes without
    values.

    It takes names of linear layers that experts had in transformers 4 for names of stacked weights,
    and doubles their rank; and it would compute magnitudes from weights that are not loaded yet, or
    that this process holds in part.
    """
    import torch
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.utils import transformers_weight_conversion as conversion

    def declare(self: Any, *, base_layer: Any, **_: Any) -> None:
        # A linear layer of torch, or of transformers' GPT-2 kind.
        rows = base_layer.out_features if hasattr(base_layer, "out_features") else base_layer.nf
        self.weight = torch.nn.Parameter(torch.empty(int(rows)))

    name = "convert_peft_config_for_transformers"
    with (
        replaced(DoraLinearLayer, "update_layer", declare),
        replaced(conversion, name, lambda *_, **__: None),
    ):
        yield


def read_as_experts(model: Any, name: str) -> bool:
    """Whether peft takes a linear layer's name for the name of stacked weights of experts."""
    from peft import LoraConfig
    from peft.utils import transformers_weight_conversion as conversion

    config = LoraConfig(target_modules=[name])
    try:
        conversion.convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:  # one of the two weights that were stacked
        return True
    return name not in (config.target_modules or ())


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of every name in the file."""
ADAPTER = "default"
"""Name of the adapter, which is part of the module's names and not of the file's."""


def name_in_file(name: str) -> str:
    """Return the name under which peft saves a tensor of the module, or has saved it."""
    parts = name.removeprefix(PREFIX).split(".")
    # Updates of several stacked weights of a module differ in nothing else.
    update = next((place for place, part in enumerate(parts) if part.startswith("lora_")), 0)
    left_out = (ADAPTER, "base_layer", "modules_to_save")
    kept = [
        part
        for place, part in enumerate(parts)
        if part not in left_out or (part == "base_layer" and place < update)
    ]
    # A parameter in early versions of peft has since become a module's `weight`.
    return (PREFIX + ".".join(kept)).replace("_magnitude_vector.weight", "_magnitude_vector")


def name_without_updates(name: str) -> str:
    """The name of a tensor of peft's module in the model without updates."""
    parts = name.removeprefix(PREFIX).split(".")
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer, or the stacked weights of a layer's experts, with an update."""

    name: str
    """Name of the linear layer's module, or of the stacked weights, without updates."""
    weight: str
    """Name of the weight that is updated, in the model without updates."""
    down: str
    """Name of the tensor A, shape (rank, inputs), or (experts, rank, inputs)."""
    up: str
    """Name of the tensor B, shape (outputs, rank), or (experts, outputs, rank)."""
    magnitude: str | None = None
    """Name of the lengths of the rows, shape (outputs,), with DoRA."""
    rank: int
    """Rank of the update, for each expert."""
    scaling: float
    transposed: bool
    """Whether a weight is (inputs, outputs), as GPT-2's are."""
    inputs: int
    outputs: int
    experts: int | None = None
    """Number of stacked weights; None for a linear layer."""
    nested: int = 0
    """Number of updates of the same module that peft puts around this one."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of the update's tensors."""
        stack = () if self.experts is None else (self.experts,)
        shapes: dict[str, tuple[int, ...]] = {
            self.down: (*stack, self.rank, self.inputs),
            self.up: (*stack, self.outputs, self.rank),
        }
        return shapes | ({} if self.magnitude is None else {self.magnitude: (self.outputs,)})

    @property
    def in_file(self) -> Mapping[str, str]:
        """Name -> name in peft's file of the update's tensors."""
        if self.experts is None:
            return {name: name_in_file(name) for name in self.shapes}
        # peft wraps the module of the experts once for each stacked weight, the last one outermost,
        # and names none of them.
        owner = PREFIX + self.name.rpartition(".")[0] + ".base_layer" * self.nested
        return {self.down: f"{owner}.lora_A.weight", self.up: f"{owner}.lora_B.weight"}
