"""What of peft and bitsandbytes is not their documented API, in one place; contract tests guard
it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from pipeline.utils.optional import optional


def import_peft() -> Any:
    """peft, without what it says about optional packages when it is first imported."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        bitsandbytes()  # which peft would import, with all that comes with it
    with optional("adapter.lora needs peft", hint="pip install 'pipetrain[adapter]'"):
        import peft
    return peft


@functools.cache
def bitsandbytes() -> Any:
    """The package, without what it says of missing kernels, and without the ones that it would
    fetch from the hub when it is imported."""
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
    """Without peft's advice, and the warnings of what it calls in transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextlib.contextmanager
def uninitialised() -> Iterator[None]:
    """Updates made inside get no values: peft would compute DoRA's from weights that are not there
    yet, or of which this process holds a part."""
    import torch
    from peft.tuners.lora.dora import DoraLinearLayer

    def declare(self: Any, *, base_layer: Any, **_: Any) -> None:
        self.weight = torch.nn.Parameter(torch.empty(_outputs(base_layer)))

    computed = DoraLinearLayer.update_layer
    DoraLinearLayer.update_layer = declare
    try:
        yield
    finally:
        DoraLinearLayer.update_layer = computed


def _outputs(layer: Any) -> int:
    """Of a linear layer of torch, or of transformers' GPT-2 kind."""
    return int(layer.out_features if hasattr(layer, "out_features") else layer.nf)


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before every name in the file."""
ADAPTER = "default"
"""Name of the adapter, which is part of the module's names and not of the file's."""


def name_in_file(name: str) -> str:
    """The name under which peft saves a tensor of the module with updates.

    It takes such a name too, and those that files of other versions have.
    """
    left_out = (ADAPTER, "base_layer", "modules_to_save")
    kept = [part for part in name.removeprefix(PREFIX).split(".") if part not in left_out]
    # A parameter in early versions of peft has since become a module's `weight`.
    return (PREFIX + ".".join(kept)).replace("_magnitude_vector.weight", "_magnitude_vector")
