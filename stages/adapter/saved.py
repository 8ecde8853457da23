"""What a saved adapter says of itself, against a stage's settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.adapter.lora import Lora


def differences(stage: Lora, config: Path) -> Iterator[tuple[str, str]]:
    """Where peft's `config` file means another function than `stage`: what, and what to do."""
    try:
        saved: Any = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        yield f"{config} cannot be read: {error}", ""
        return
    if not isinstance(saved, dict) or saved.get("peft_type") != "LORA":
        yield f"{config} is of no LoRA", ""
        return
    for key in ("rank_pattern", "alpha_pattern"):
        if saved.get(key):
            yield f"its {key} gives layers settings of their own, which adapter.lora has not", ""
    scaling = "rslora" if saved.get("use_rslora") else "standard"
    told = {
        "rank": saved.get("r"),
        "alpha": saved.get("lora_alpha"),
        "scaling": scaling,
        "dora": bool(saved.get("use_dora")),
    }
    for field, value in told.items():
        own = getattr(stage, field)
        if value != own:
            yield f"was trained with {field}: {value}, this is {own}", f"set {field}: {value}"
