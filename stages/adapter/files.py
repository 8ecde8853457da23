"""The files of an adapter, as peft saves it, and its tensors' names there."""

from __future__ import annotations

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
