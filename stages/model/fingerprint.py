"""Identity of an architecture with its weights, without reading all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

EDGE = 1 << 20
UNSTABLE = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "_model_name_or_path")


def source_fingerprint(
    config: Any, files: Iterable[Path], *, seed: int | None, new: Sequence[str] = ()
) -> str:
    """sha256 over the config, the weight files, and the seed and names of what is drawn.

    Of a file count its name, size, first and last MiB: cheap for any model, and the first MiB of a
    safetensors file is (or starts with) its header.
    """
    stable = {key: value for key, value in config.to_dict().items() if key not in UNSTABLE}
    digest = hashlib.sha256(json.dumps(stable, sort_keys=True, default=str).encode())
    if seed is not None:
        digest.update(f"random {seed}".encode())
        digest.update("\0".join(new).encode())
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        digest.update(_edges(file))
    return digest.hexdigest()


def _edges(file: Path) -> bytes:
    with file.open("rb") as stream:
        first = stream.read(EDGE)
        stream.seek(max(0, file.stat().st_size - EDGE))
        return first + stream.read(EDGE)
