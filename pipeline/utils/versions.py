"""Versions of the packages that decide what a run computes."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterable

PACKAGES = ("pipetrain", "torch", "transformers", "deepspeed", "accelerate", "safetensors", "numpy")


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Package -> its version, of those that are installed."""
    found = {}
    for package in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
