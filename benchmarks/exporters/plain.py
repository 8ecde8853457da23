"""One safetensors file with all weights, which `cp` copies and every output must equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import values
from apart.child import Job, Place, Work
from xxhash import xxh3_64

from exporters.trained import WEIGHT, trained
from pipeline.checkpoint.file_layout import Entry, header


def write(job: Job, place: Place) -> Work:
    """Write `folder`."""

    def work() -> Any:
        file = Path(job["folder"]) / "model.safetensors"
        shapes = trained(job["config"]).shapes
        entries = [
            Entry(name, "F32", shape, 4 * math.prod(shape)) for name, shape in shapes.items()
        ]
        with file.open("wb") as out:
            out.write(header(entries, metadata={"format": "pt"}))
            for name, shape in shapes.items():
                for data in values.floats(f"{WEIGHT}/{name}", 0, math.prod(shape)):
                    out.write(data.data.cast("B"))
        return {"needed": [(str(file), 0, file.stat().st_size)]}

    return work


def expected(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of every weight by name."""
    found = {}
    for name, shape in trained(config).shapes.items():
        digest = xxh3_64(str(shape).encode())
        for data in values.floats(f"{WEIGHT}/{name}", 0, math.prod(shape)):
            digest.update(data.data.cast("B"))
        found[name] = digest.hexdigest()
    return found


def wrong(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """Return the names of the tensors that a folder lacks, has in excess, or has with other bits,
    in safetensors files or a file of `torch.save`."""
    found: dict[str, str] = {}
    for name, tensor in _tensors(folder):
        digest = xxh3_64(str(tuple(tensor.shape)).encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        found[name] = digest.hexdigest() if tensor.dtype == torch.float32 else str(tensor.dtype)
    return sorted(name for name in {*found, *digests} if found.get(name) != digests.get(name))


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)
    for file in sorted(folder.rglob("*.pt")):
        yield from torch.load(file, mmap=True, weights_only=True)["model"].items()
