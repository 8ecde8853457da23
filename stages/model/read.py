"""The config of a `model.hf` slot, read without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import StageError
from stages.model.files import commit_at, is_gguf, is_local, local, read_json
from stages.model.gguf_header import read_header

if TYPE_CHECKING:
    from stages.model.hf import HfModel

TUNED = ("-Instruct", "-instruct", "-chat-hf", "-Base", "-base", "-Chat", "-it", "-pt")
"""Endings of hub ids that name a kind of tuning."""


def known_config(repo: str) -> dict[str, Any] | None:
    """The config of a well-known model of the hub, by `known_models.json`; None for other models.

    It needs no network and no accepted licence.
    """
    base = repo
    for ending in TUNED:
        base = base.removesuffix(ending)
    models = read_json(Path(__file__).with_name("known_models.json"))
    return models.get(base) or models.get(f"{base}-hf") or models.get(repo)


def read_config(stage: HfModel) -> dict[str, Any]:
    """The config, with the slot's own vocabulary size; a hub model's config.json is downloaded, if
    it is not in the hub's cache. Raises StageError if it cannot be read."""
    config = _read(stage)
    if stage.vocab_size is not None:
        config["vocab_size"] = stage.vocab_size
    return config


def config_at_hand(stage: HfModel) -> dict[str, Any] | None:
    """The config, if it can be read without a network."""
    if stage.path is None and stage.config is None:
        return None
    if stage.path is not None and not is_local(stage.path) and known_config(stage.path) is None:
        return None
    try:
        return read_config(stage)
    except StageError:
        return None


def _read(stage: HfModel) -> dict[str, Any]:
    if isinstance(stage.config, Mapping):
        return dict(stage.config)
    if stage.config is not None:
        return read_json(local(stage.config))
    assert stage.path is not None
    if not is_local(stage.path):
        return known_config(stage.path) or read_json(_from_hub(stage.path, stage.revision))
    if is_gguf(stage.path):
        return _gguf(local(stage.path))
    if stage.gguf_file is not None:
        return _gguf(local(stage.path) / stage.gguf_file)
    return read_json(local(stage.path) / "config.json")


def _from_hub(repo: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    commit = commit_at(repo, revision)
    try:
        return Path(hf_hub_download(repo, "config.json", revision=commit))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise StageError(
            f"cannot get the config of {repo} at {commit}: {error}",
            hint="give `path` a folder that holds its config.json",
        ) from error


GGUF_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
}
"""Metadata of a GGUF file, after the architecture's name -> the config's key."""


def _gguf(file: Path) -> dict[str, Any]:
    metadata, shapes = gguf_header(file)
    if "token_embd.weight" not in shapes:
        raise StageError(f"{file} has no tensor 'token_embd.weight'")
    kind = metadata.get("general.architecture")
    experts = metadata.get(f"{kind}.expert_count", 0)
    if experts != 0:
        raise StageError(
            f"{file}: its header does not have all sizes of a {kind} with {experts} experts",
            hint="plan it from a folder in Hugging Face layout",
        )
    found = {name: metadata.get(f"{kind}.{key}") for key, name in GGUF_KEYS.items()}
    return {
        "model_type": kind,
        **{name: value for name, value in found.items() if value is not None},
        "vocab_size": shapes["token_embd.weight"][-1],
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def gguf_header(file: Path) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]:
    """Return what `read_header` does. Raises StageError for a file that is no GGUF or is cut."""
    try:
        return read_header(file)
    except (OSError, ValueError) as error:
        hint = "download or copy it again"
        raise StageError(f"{file} cannot be read as GGUF: {error}", hint=hint) from error
