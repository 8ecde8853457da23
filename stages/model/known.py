"""Architectures of well-known models, by their config.json on the hub: planning them needs no
network and no accepted licence."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

TUNED = ("-Instruct", "-instruct", "-chat-hf", "-Base", "-base", "-Chat", "-it", "-pt")
"""Ends of hub ids that say how a model was tuned."""


def known_config(repo: str) -> dict[str, Any] | None:
    """The config of a hub model; None for one that is not in `known_models.json`."""
    base = repo
    for ending in TUNED:
        base = base.removesuffix(ending)
    found = _models().get(base) or _models().get(f"{base}-hf") or _models().get(repo)
    return None if found is None else dict(found)


@functools.cache
def _models() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("known_models.json").read_text("utf-8")
    models: dict[str, dict[str, Any]] = json.loads(text)
    return models
