"""Private modules of torchao 0.18; a contract test guards the names that are used."""

from __future__ import annotations

import importlib
from types import ModuleType

from pipeline import StageError
from pipeline.utils import unheard


def adam() -> ModuleType:
    """The module with the update rule, `single_param_adam`."""
    return _module("torchao.optim.adam")


def quantizers() -> ModuleType:
    """The module with `create_dynamic_map` and `quantize_8bit_with_qmap`."""
    return _module("torchao.optim.quant_utils")


def _module(name: str) -> ModuleType:
    try:
        with unheard():
            return importlib.import_module(name)
    except ImportError as error:
        raise StageError(
            f"this optimizer needs torchao: {error}", hint="pip install 'pipetrain[torchao]'"
        ) from error
