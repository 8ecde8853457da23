"""What torchao 0.18 keeps beside its public optimizers, in one place; a contract test guards it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import StageError
from pipeline.utils.optional import unheard

if TYPE_CHECKING:
    import types


def adam() -> types.ModuleType:
    """The update rule: `single_param_adam`."""
    return _module("torchao.optim.adam")


def quantizers() -> types.ModuleType:
    """`create_dynamic_map`, `quantize_8bit_with_qmap`, `quantize_4bit_with_qmap`."""
    return _module("torchao.optim.quant_utils")


def four_bit() -> types.ModuleType:
    """The code books of four bits: `get_qmap_signed`, `get_qmap_unsigned`."""
    return _module("torchao.optim.subclass_4bit")


def _module(name: str) -> types.ModuleType:
    import importlib

    try:
        with unheard():
            return importlib.import_module(name)
    except ImportError as error:
        raise StageError(
            f"this optimizer needs torchao: {error}", hint="pip install 'pipetrain[torchao]'"
        ) from error
