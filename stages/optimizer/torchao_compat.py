"""Private modules of torchao 0.18; a contract test guards the names that are used."""

from __future__ import annotations

import importlib
from types import ModuleType

from pipeline.utils import optional


def adam() -> ModuleType:
    """The module with the update rule, `single_param_adam`."""
    return _module("torchao.optim.adam")


def quantizers() -> ModuleType:
    """The module with `create_dynamic_map` and `quantize_8bit_with_qmap`."""
    return _module("torchao.optim.quant_utils")


def _module(name: str) -> ModuleType:
    with optional("this optimizer needs torchao", hint="pip install 'pipetrain[torchao]'"):
        return importlib.import_module(name)
