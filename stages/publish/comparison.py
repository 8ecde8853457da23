"""What a repository holds against what was exported."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from huggingface_hub import CommitOperationAdd
from huggingface_hub.hf_api import RepoFile


def other_weights(there: Iterable[str], ours: Collection[str]) -> list[str]:
    """Files at the top of the repository that loaders would mix with the model or take instead of
    it: shards of another size, an index, an adapter."""
    return sorted(name for name in there if name not in ours and _is_loaded(name))


def _is_loaded(name: str) -> bool:
    ending = (".safetensors", ".safetensors.index.json")
    return name == "adapter_config.json" or ("/" not in name and name.endswith(ending))


def differences(
    additions: Iterable[CommitOperationAdd], there: Mapping[str, RepoFile]
) -> Iterator[str]:
    """In what the repository's files are not those that were uploaded, in words."""
    for addition in additions:
        name = addition.path_in_repo
        if name not in there:
            yield f"{name} is not there"
        else:
            yield from _difference(addition, there[name])


def _difference(addition: CommitOperationAdd, remote: RepoFile) -> Iterator[str]:
    name, size = addition.path_in_repo, addition.upload_info.size
    if remote.size != size:
        yield f"{name} has {remote.size} bytes instead of {size}"
    elif remote.lfs is not None:
        if remote.lfs.sha256 != addition.upload_info.sha256.hex():
            yield f"{name} has another sha256"
    elif remote.blob_id != _git_hash(Path(str(addition.path_or_fileobj))):
        yield f"{name} has other contents"


def _git_hash(path: Path) -> str:
    """Git's name for a file that is stored as it is; those are small."""
    content = path.read_bytes()
    header = f"blob {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
