"""Which architectures transformers has a causal language model for, without importing it."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Collection
from pathlib import Path

TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict("


@functools.cache
def causal_types() -> Collection[str]:
    """The `model_type`s of its table; empty when that is not found. Importing the table would
    import torch, which takes seconds."""
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return ()
    file = Path(found.submodule_search_locations[0]) / "models/auto/modeling_auto.py"
    try:
        pairs = file.read_text("utf-8").split(TABLE)[1].split("\n)\n")[0]
        return frozenset(name for name, _ in ast.literal_eval(pairs.strip()))
    except (OSError, IndexError, ValueError, SyntaxError):
        return ()
