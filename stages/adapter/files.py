"""The files of an adapter, as peft saves it, and its tensors' names there."""

from __future__ import annotations

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before every name in the file."""
ADAPTER = "default"
"""Name of the adapter, which is part of the module's names and not of the file's."""


def name_in_file(name: str) -> str:
    """What a tensor of the module with updates is called in the file."""
    parts = [part for part in name.split(".") if part not in (ADAPTER, "base_layer")]
    return PREFIX + ".".join(parts)
