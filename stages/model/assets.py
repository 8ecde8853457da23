"""Everything beside the weights that transformers needs to load a model."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from pipeline.errors import StageError

LOCAL_KEYS = (
    "_name_or_path",
    "_model_name_or_path",
    "name_or_path",
    "is_local",
    "local_files_only",
)
"""What transformers notes about where it read from; means nothing elsewhere."""


def save_config(config: Any, folder: Path, *, architecture: str, dtype: str) -> None:
    """Write config.json; `dtype` as torch spells it (`bfloat16`)."""
    config = copy.deepcopy(config)
    config.architectures = [architecture]
    config.dtype = dtype
    config.save_pretrained(folder)
    _drop_keys(folder / "config.json", (*LOCAL_KEYS, "quantization_config", "gguf_file"))


def save_generation_config(config: Any, source: Path | None, folder: Path) -> None:
    """Write generation_config.json: the source's own, else what the config implies."""
    from transformers import GenerationConfig

    own = source / "generation_config.json" if source else None
    if own is not None and own.is_file():
        # As it is: transformers refuses to save some settings that published models have.
        shutil.copyfile(own, folder / own.name)
        return
    generation = GenerationConfig.from_model_config(config)
    generation.save_pretrained(folder)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer and its chat template."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    if file.is_file():
        _drop_keys(file, (*LOCAL_KEYS, "gguf_file"))


def copy_code(source: Path | None, folder: Path) -> None:
    """Copy the model code that came with the source."""
    if source is None:
        raise StageError("the model's code came from nowhere that it can be copied from")
    for file in sorted(source.glob("*.py")):
        shutil.copyfile(file, folder / file.name)


def _drop_keys(file: Path, keys: tuple[str, ...]) -> None:
    content = json.loads(file.read_text("utf-8"))
    kept = {key: value for key, value in content.items() if key not in keys}
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
