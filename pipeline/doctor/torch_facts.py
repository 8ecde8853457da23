"""What torch says about itself and the GPUs it can use. Runs in a process of its own, because
CUDA keeps memory on every GPU that it has looked at."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def measure(settings: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell one record; its `problem` is why there is no more to tell."""
    try:
        import torch
    except Exception as error:  # a broken installation raises whatever it likes
        tell({"problem": f"torch cannot be imported: {error}", "devices": []})
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        devices = list(_devices()) if torch.cuda.is_available() else []
    problem = None if devices or not said else str(said[0].message).split("\n")[0]
    tell({"cuda": torch.version.cuda, "nccl": _nccl(), "problem": problem, "devices": devices})


def _devices() -> Iterator[dict[str, Any]]:
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield {
            "name": properties.name,
            "uuid": f"GPU-{properties.uuid}",
            "memory_bytes": properties.total_memory,
            "memory_free_bytes": torch.cuda.mem_get_info(index)[0],
            "compute_capability": f"{properties.major}.{properties.minor}",
        }


def _nccl() -> str | None:
    """The NCCL that torch was built with."""
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None or not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
