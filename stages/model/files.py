"""Files of a model: a folder in Hugging Face layout, a GGUF file, or a download of the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import StageError, in_words, system_errors_as
from pipeline.utils import HubName, commit_of, parse_json, read_whole

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
REVISION = re.compile(r"[A-Za-z0-9_][\w./-]*")
"""A commit, a branch or a tag."""
ADAPTER = "adapter_config.json"
"""File of peft: where it lies next to weights, from_pretrained applies an adapter."""
SAFE = "model.safetensors.index.json", "model.safetensors"
TORCH = "pytorch_model.bin.index.json", "pytorch_model.bin"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "spiece.model",
)  # fmt: skip
ASSETS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
MOST = 1 << 28
"""Most bytes of a JSON file of a model. An index of weights is the largest."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """A local folder, or with `gguf` that file in it."""

    folder: Path
    gguf: str | None = None

    def __str__(self) -> str:
        return str(self.folder / self.gguf) if self.gguf else str(self.folder)


def is_local(path: str) -> bool:
    """Whether `path` names something on disk rather than on the hub."""
    return path.startswith(("/", "./", "../", "~")) or path in (".", "..") or is_gguf(path)


def is_gguf(path: str) -> bool:
    """Whether `path` is a GGUF file by its name."""
    return path.lower().endswith(".gguf")


def local(path: str) -> Path:
    """Return the path with `~` expanded."""
    return Path(path).expanduser()


def is_plain(name: str) -> bool:
    """Whether a file name that is not ours stays inside the folder it is taken relative to."""
    parts = Path(name).parts
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts


def find_files(
    path: str, revision: str | None = None, gguf: str | None = None, *, weights: bool = False
) -> Files:
    """Return a folder or a GGUF file, downloaded into the hub's cache if `path` is a hub id, with
    `weights` where they are asked for. Raises StageError if there is none."""
    if not is_local(path):
        wanted = [gguf] if gguf else ["*.safetensors"] if weights else []
        folder = download(path, revision, [*ASSETS, *wanted])
        if weights and not gguf and not any(folder.glob("*.safetensors")):
            folder = download(path, revision, [*ASSETS, "pytorch_model*.bin"])
        return Files(folder=folder, gguf=gguf)
    place = local(path)
    if is_gguf(path):
        place, gguf = place.parent, place.name
    if not place.is_dir():
        raise StageError(f"no such folder: {place}")
    if gguf is not None and not (place / gguf).is_file():
        raise StageError(f"no such file: {place / gguf}")
    return Files(folder=place.absolute(), gguf=gguf)


def download(repo: str, revision: str | None, patterns: list[str] | None = None) -> Path:
    """Return the folder in the hub's cache with a model's files that match the patterns, or its
    config.json if there are none. Raises StageError."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    commit = commit_of(
        HubName(kind="model", repo=repo, revision=revision, named_by="path", key="revision")
    )
    try:
        if patterns is None:
            return Path(hf_hub_download(repo, "config.json", revision=commit))
        return Path(snapshot_download(repo, revision=commit, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        if patterns is None:
            raise StageError(
                f"cannot get the config of {repo} at {commit}: {error}",
                hint="give `path` a folder that holds its config.json",
            ) from error
        raise StageError(
            f"cannot get {repo} at {commit} from the hub: {error}",
            hint="download it where there is a network and give `path` the folder",
        ) from error


def safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the folder, in order; empty when it has none."""
    return _indexed(folder, *SAFE)


def weight_files(folder: Path, gguf: str | None) -> list[Path]:
    """Return the files that the weights are read from. Raises StageError when there are none."""
    files = [folder / gguf] if gguf else safetensors_files(folder) or _indexed(folder, *TORCH)
    if not files:
        raise StageError(
            f"no weights in {folder}",
            hint="expected model.safetensors, model.safetensors.index.json or pytorch_model.bin",
        )
    with system_errors_as(StageError):  # a name that is too long
        missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise StageError(f"a weight file is missing: {missing}")
    return files


def _indexed(folder: Path, index: str, single: str) -> list[Path]:
    """The files that an index lists, or the single one."""
    if (folder / single).is_file():
        return [folder / single]
    if not (folder / index).is_file():
        return []
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise StageError(f"{folder / index} is damaged: it has no weight_map")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        # An index is data from outside: it must not make us read elsewhere.
        if not is_plain(name):
            raise StageError(f"{folder / index} points outside its folder: {name!r}")
    return [folder / name for name in names]


def beside(folder: Path) -> tuple[str, str]:
    """Return a sentence on an adapter next to the weights of a folder, and one on the same weights
    in two forms; each empty without them."""
    file, forms = folder / ADAPTER, (SAFE, TORCH)
    adapter = f"{file}: the adapter next to the weights is not applied" if file.is_file() else ""
    there = [name for form in forms for name in reversed(form) if (folder / name).is_file()]
    if not any(set(form) <= set(there) for form in forms):
        return adapter, ""
    return adapter, f"{folder} has {', '.join(there[:-1])} and {there[-1]}: {there[0]} is read"


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds any file of a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def largest_id(folder: Path) -> int | None:
    """Return the largest id in a tokenizer's files, or None. Raises StageError for damage."""
    ids: list[int] = []
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        if file.is_file():
            content = read_json(file)
            try:
                vocabulary = (content.get("model") or {}).get("vocab")
                ids += map(int, vocabulary.values() if isinstance(vocabulary, dict) else ())
                ids += [int(token["id"]) for token in content.get("added_tokens") or ()]
                ids += map(int, content.get("added_tokens_decoder") or ())
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                message = f"{file} is damaged: a token has no id, or none that is a number"
                raise StageError(message) from error
    return max(ids, default=None)


def read_json(file: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises StageError for anything else."""
    try:
        content = parse_json(read_whole(file, most=MOST))
    except (OSError, ValueError) as error:
        raise StageError(f"{file} cannot be read: {in_words(error)}") from error
    if not isinstance(content, dict):
        raise StageError(f"{file} is not a JSON object")
    return content


def kernels_named(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the hub's kernels (`owner/name`) that a config makes transformers run."""
    for key, value in config.items():
        inner = value if isinstance(value, Mapping) else {"": value}
        if key.endswith(("_implementation", "_implementation_internal")):
            yield from (each for each in inner.values() if isinstance(each, str) and "/" in each)
        elif isinstance(value, Mapping):
            yield from kernels_named(value)
