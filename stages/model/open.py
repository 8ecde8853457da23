"""From the slot's fields to a model source: find folders, read the config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import StageError
from stages.model import compat
from stages.model.loaded_reader import require_gguf
from stages.model.paths import is_gguf, is_local, local
from stages.model.source import Files, HfSource

if TYPE_CHECKING:
    from pipeline.stage import Context
    from stages.model.hf import HfModel

ASSETS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")


def open_source(stage: HfModel, ctx: Context) -> HfSource:
    """The declared model. Rank 0 goes first, so that the others find what it downloaded."""
    with ctx.dist.main_first():
        files = None if stage.path is None else _files(stage, stage.path)
        words = files if stage.tokenizer is None else _tokenizer_files(stage.tokenizer)
    if files is not None and files.gguf is not None:
        require_gguf()
    random = stage.config is not None or stage.init == "random"
    return HfSource(
        name=stage.path or "random initialisation",
        config=_config(stage, files),
        files=files,
        tokenizer_files=words,
        seed=ctx.seed if random else None,
        attention=stage.attention,
        trust_remote_code=stage.trust_remote_code,
        log=ctx.log,
    )


def _files(stage: HfModel, path: str) -> Files:
    if not is_local(path):
        weights = stage.init == "pretrained"
        return _hub_files(path, stage.revision, stage.gguf_file, weights=weights)
    return _local_files(path, stage.gguf_file)


def _local_files(path: str, gguf: str | None = None) -> Files:
    place = local(path)
    if is_gguf(path):
        place, gguf = place.parent, place.name
    if not place.is_dir():
        raise StageError(f"no such folder: {place}")
    if gguf is not None and not (place / gguf).is_file():
        raise StageError(f"no such file: {place / gguf}")
    return Files(folder=place.absolute(), gguf=gguf)


def _tokenizer_files(path: str) -> Files:
    if is_local(path):
        return _local_files(path)
    return _hub_files(path, None, None, weights=False)


def _hub_files(repo: str, revision: str | None, gguf: str | None, *, weights: bool) -> Files:
    """Download what is needed into the hub cache (from the cache alone when it is complete)."""
    wanted = [
        *ASSETS,
        *([gguf] if gguf else []),
        *(["*.safetensors"] if weights and not gguf else []),
    ]
    folder = _snapshot(repo, revision, wanted)
    if weights and not gguf and not any(folder.glob("*.safetensors")):
        folder = _snapshot(repo, revision, [*ASSETS, "pytorch_model*.bin"])
    return Files(folder=folder, gguf=gguf)


def _snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise StageError(
            f"cannot get {repo} (revision {revision or 'main'}) from the hub: {error}",
            hint="download it where there is a network and give `path` the folder",
        ) from error


def _spelled_out(config: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(config, str):
        return dict(json.loads(local(config).read_text("utf-8")))
    return dict(config)


def _config(stage: HfModel, files: Files | None) -> Any:
    """The transformers config. Raises StageError if it is unusable or its weights are quantized."""
    from transformers import AutoConfig

    try:
        with compat.quiet():
            if files is None:
                assert stage.config is not None
                values = _spelled_out(stage.config)
                return AutoConfig.for_model(values.pop("model_type"), **values)
            config = AutoConfig.from_pretrained(
                files.folder,
                gguf_file=files.gguf,
                trust_remote_code=stage.trust_remote_code,
                local_files_only=True,
            )
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise StageError(f"the model's config cannot be used: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise StageError(
            f"the weights of {stage.path} are quantized and cannot be trained",
            hint="use the unquantized model",
        )
    return config
