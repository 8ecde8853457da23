"""From the slot's fields to a model source: find folders, read the config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import StageError
from stages.model.assets import config_of_files, config_of_recipe
from stages.model.files import Files, is_gguf, is_local, local
from stages.model.gguf import require_gguf, require_whole
from stages.model.reconcile import Allowed
from stages.model.source import HfSource, Training

if TYPE_CHECKING:
    from pipeline.contracts.stage import Context
    from stages.model.hf import HfModel

ASSETS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")


def open_source(stage: HfModel, ctx: Context) -> HfSource:
    """The declared model. Rank 0 goes first, so that the others find what it downloaded."""
    with ctx.dist.rank0_first():
        files = None if stage.path is None else _files(stage, stage.path)
        words = files if stage.tokenizer is None else _tokenizer_files(stage.tokenizer)
    for each in (files, words):
        if each is not None and each.gguf is not None:
            require_gguf()
            require_whole(each.folder / each.gguf)
    if stage.config is not None:
        config = config_of_recipe(stage.config)
    else:
        assert files is not None
        config = config_of_files(files, trust_remote_code=stage.trust_remote_code)
    if stage.vocab_size is not None:
        config.get_text_config().vocab_size = stage.vocab_size
    random = stage.config is not None or stage.init == "random"
    return HfSource(
        name=stage.path or "random initialisation",
        config=config,
        files=files,
        tokenizer_files=words,
        seed=ctx.seed,
        random=random,
        allowed=Allowed(new=stage.new_weights, unused=stage.unused_weights),
        resized=stage.vocab_size is not None,
        attention=stage.attention,
        training=Training(
            checkpointing=stage.activation_checkpointing,
            compile=stage.compile,
            fp8=stage.fp8,
            kernels=stage.kernels,
        ),
        trust_remote_code=stage.trust_remote_code,
        log=ctx.log,
    )


def _files(stage: HfModel, path: str) -> Files:
    if not is_local(path):
        weights = stage.init == "pretrained"
        return _hub_files(path, stage.revision, stage.gguf_file, weights=weights)
    return local_files(path, stage.gguf_file)


def local_files(path: str, gguf: str | None = None) -> Files:
    """The folder, or the GGUF file in it. Raises StageError where there is none."""
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
        return local_files(path)
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
