"""Problems of a model slot's tokenizer that show before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import Problem
from pipeline.stage import PlanView
from stages.model.hf import HfModel
from stages.model.paths import has_tokenizer, is_gguf, is_local, local

TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def tokenizer_problems(plan: PlanView, *, template: bool) -> Iterator[Problem]:
    """Yield the problem of a stage that needs the tokenizer, and perhaps its chat template, where
    the model has none. Files on the hub are not looked at."""
    model = plan.find(HfModel)
    if model is None or plan.forecast:
        return
    given = model.tokenizer or model.path
    if given is None and model.config is None:
        return
    if given is not None and (not is_local(given) or not local(given).exists()):
        return  # which is the model slot's to say
    has, has_template = (False, False) if given is None else _found(model, local(given))
    if not has:
        yield Problem(
            message="needs a tokenizer, and the model comes without one",
            hint="set `tokenizer` in the model's slot to a folder that has one",
        )
    elif template and not has_template:
        yield Problem(
            message=f"lays rows out by a chat template, and the tokenizer of {given} has none",
            hint="use an instruction-tuned model, or `template: false` for pairs of texts",
        )


def _found(model: HfModel, place: Path) -> tuple[bool, bool]:
    """Whether there is a tokenizer, and whether it has a chat template."""
    if model.tokenizer is None and model.gguf_file is not None:
        place = place / model.gguf_file
    if is_gguf(place.name):
        return _in_gguf(place)
    return has_tokenizer(place), any((place / name).exists() for name in TEMPLATES) or _told(place)


def _told(folder: Path) -> bool:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        return bool(config.get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _in_gguf(file: Path) -> tuple[bool, bool]:
    from stages.model.gguf_header import read_header

    try:
        metadata, _ = read_header(file)
    except (OSError, ValueError):
        return True, True  # which the run tells
    return "tokenizer.ggml.model" in metadata, "tokenizer.chat_template" in metadata
