"""Say what is really running, and refuse to train on anything else than what was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.contracts.engine import Engine
from pipeline.contracts.stage import Context
from pipeline.errors import EngineMismatch
from pipeline.run import rundir
from pipeline.utils.files import replace_text


def verify_engine(ctx: Context, engine: Engine, expected: Mapping[str, Any]) -> None:
    """Write the engine's facts to `engine.json`, show them, and compare them with `expected`.

    `engine.describe()` is read off the live objects; `expected` follows from the recipe alone.
    Raises EngineMismatch on every rank where they differ, naming each difference.
    """
    facts = dict(engine.describe())
    differences = [
        f"{key}: asked for {value!r}, found {facts.get(key)!r}"
        for key, value in expected.items()
        if facts.get(key) != value
    ]
    if ctx.dist.is_main:
        replace_text(ctx.run_dir / rundir.ENGINE, json.dumps(facts, indent=1) + "\n")
    ctx.log.info("running: %s", ", ".join(f"{key} {_shown(facts[key])}" for key in facts))
    if differences:
        raise EngineMismatch("what runs is not what the recipe asks for: " + "; ".join(differences))


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " x ".join(f"{key}:{size}" for key, size in value.items())
    if isinstance(value, list):
        return "+".join(map(str, value)) or "none"
    return f"{value:,}" if type(value) is int else str(value)
