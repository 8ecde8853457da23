"""Files of a model: a folder in Hugging Face layout, a GGUF file, or a download of the hub; and the
config of a `model.hf` slot and the header of a GGUF file, read without transformers.

Headers (ggml's docs/gguf.md) are read here because the gguf package makes an array of every token
of the vocabulary, which takes seconds, and walks through whatever number of elements a damaged
header claims.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from pipeline import StageError, in_words, system_errors_as
from pipeline.utils import HubName, commit_of, expanded, open_regular, parse_json, read_whole

if TYPE_CHECKING:
    from stages.model.settings import HfSettings

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
    place = expanded(path)
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


def not_read(folder: Path) -> tuple[str, str]:
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


TUNED = ("-Instruct", "-instruct", "-chat-hf", "-Base", "-base", "-Chat", "-it", "-pt")
"""Endings of hub ids that name a kind of tuning."""
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


def known_config(repo: str) -> dict[str, Any] | None:
    """Return the config of a well-known model of the hub, by `known_models.json`; None for other
    models. It needs no network and no accepted licence."""
    base = repo
    for ending in TUNED:
        base = base.removesuffix(ending)
    models = read_json(Path(__file__).with_name("known_models.json"))
    return models.get(base) or models.get(f"{base}-hf") or models.get(repo)


def read_config(stage: HfSettings) -> dict[str, Any]:
    """Return the config, with the slot's own vocabulary size; a hub model's config.json is
    downloaded, if it is not in the hub's cache. Raises StageError if it cannot be read."""
    given, path = stage.config, stage.path
    if given is not None:
        config = dict(given) if isinstance(given, Mapping) else read_json(expanded(given))
    elif path is not None and not is_local(path):
        config = known_config(path) or read_json(download(path, stage.revision))
    else:
        assert path is not None
        file = expanded(path)
        if not is_gguf(path):
            file /= stage.gguf_file or "config.json"
        config = _of_gguf(file) if is_gguf(path) or stage.gguf_file else read_json(file)
    if stage.vocab_size is not None:
        config["vocab_size"] = stage.vocab_size
    return config


def _of_gguf(file: Path) -> dict[str, Any]:
    header = gguf_header(file)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise StageError(f"{file} has no tensor 'token_embd.weight'")
    kind = header.metadata.get("general.architecture")
    experts = header.metadata.get(f"{kind}.expert_count", 0)
    if experts != 0:
        raise StageError(
            f"{file}: its header does not have all sizes of a {kind} with {experts} experts",
            hint="plan it from a folder in Hugging Face layout",
        )
    found = {name: header.metadata.get(f"{kind}.{key}") for key, name in GGUF_KEYS.items()}
    return {
        "model_type": kind,
        **{name: value for name, value in found.items() if value is not None},
        "vocab_size": embedding.shape[-1],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Version 1 has numbers of other sizes; 2^24 or more is a version in another byte order."""
LONGEST_HEADER = 1 << 26
"""Bytes of a header: more than any tokenizer takes, and read in seconds."""
MOST_DIMENSIONS = 4
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its format in `struct`."""
STRING, ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file."""

    shape: tuple[int, ...]
    """Innermost dimension first."""
    kind: int
    """Number of its type, as in ggml."""
    offset: int
    """Its first byte, counted from the end of the header."""


class GgufHeader(NamedTuple):
    """The part of a GGUF file before its weights."""

    metadata: Mapping[str, Any]
    """Every array is None."""
    tensors: Mapping[str, GgufTensor]
    size: int
    """Bytes of the header, with those that align the weights after it."""


def gguf_header(file: Path) -> GgufHeader:
    """Return the header of a file; an unchanged file is read once. Raises StageError."""
    try:
        found = file.stat()
        return _header(file, found.st_ino, found.st_size, found.st_mtime_ns)
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: Exception) -> StageError:
    """Return the error of a GGUF file that is damaged."""
    return StageError(f"{file} cannot be read as GGUF: {error}", hint="download or copy it again")


@functools.lru_cache(maxsize=8)
def _header(file: Path, _inode: int, size: int, _changed: int) -> GgufHeader:
    with open_regular(file) as stream:
        too_long = size > LONGEST_HEADER
        why = "its header is too long" if too_long else "the file ends in its header"
        header = _Reader(stream, min(size, LONGEST_HEADER), why)
        if header.take(len(MAGIC)) != MAGIC:
            raise ValueError("it is not a GGUF file")
        version, tensors, pairs = header.numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version} is not known")
        metadata: dict[str, Any] = {}
        placed: dict[str, GgufTensor] = {}
        for number in range(pairs + tensors):
            name = header.text()
            if name in (metadata if number < pairs else placed):
                raise ValueError(f"it says {name!r} twice")
            if number < pairs:
                metadata[name] = header.value()
                continue
            (dimensions,) = header.numbers("I")
            if not 0 < dimensions <= MOST_DIMENSIONS:
                raise ValueError(f"{name} has {dimensions} dimensions")
            *shape, kind, offset = header.numbers(f"{dimensions}QIQ")
            placed[name] = GgufTensor(tuple(shape), kind, offset)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its weights are aligned to {alignment} bytes")
        end = stream.tell()
        return GgufHeader(metadata, placed, end + -end % alignment)


@dataclass
class _Reader:
    """Reads one value after another. Raises ValueError where the header claims more than the file,
    or any header, can hold, before anything is allocated or walked through."""

    stream: BinaryIO
    left: int
    why: str

    def take(self, count: int, *, skip: bool = False) -> bytes:
        """Return the next bytes, or `skip` them."""
        if count > self.left:
            raise ValueError(self.why)
        self.left -= count
        if skip:
            self.stream.seek(count, 1)
        return b"" if skip else self.stream.read(count)

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Return little-endian numbers of a `struct` format."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def text(self) -> str:
        return self.take(self.numbers("Q")[0]).decode("utf-8", "replace")

    def value(self) -> Any:
        """Return the value of a piece of metadata, None for an array."""
        (kind,) = self.numbers("I")
        if kind == STRING:
            return self.text()
        inner, count = self.numbers("IQ") if kind == ARRAY else (kind, 1)
        if inner == ARRAY:
            raise ValueError("it holds arrays of arrays, which nothing in a model needs")
        if inner not in SCALARS and inner != STRING:
            raise ValueError(f"there is no type {inner} in GGUF")
        if kind != ARRAY:
            return self.numbers(SCALARS[kind])[0]
        if inner != STRING:
            self.take(count * struct.calcsize(f"<{SCALARS[inner]}"), skip=True)
        for _ in range(count if inner == STRING else 0):
            self.take(self.numbers("Q")[0], skip=True)
        return None
