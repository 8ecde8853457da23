"""Say what is really running, and refuse to train on anything else than what was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.engine import Engine
from pipeline.errors import EngineMismatch
from pipeline.stage import Context


def attest(ctx: Context, engine: Engine, expected: Mapping[str, Any]) -> None:
    """Write the engine's facts to `engine.json`, show them, and compare them with `expected`.

    `engine.facts()` is read off the live objects; `expected` follows from the recipe alone. Raises
    EngineMismatch on every rank where they differ, naming each difference.
    """
    facts = dict(engine.facts())
    differences = [
        f"{key}: asked for {value!r}, found {facts.get(key)!r}"
        for key, value in expected.items()
        if facts.get(key) != value
    ]
    if ctx.dist.is_main:
        (ctx.run_dir / "engine.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    shown = ", ".join(f"{key}={value}" for key, value in facts.items())
    ctx.log.info("engine: %s", shown)
    if differences:
        raise EngineMismatch("what runs is not what the recipe asks for: " + "; ".join(differences))
