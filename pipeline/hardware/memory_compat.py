"""Snapshots of the memory of torch's allocator on this process's GPU, by names private to torch.

A snapshot is JSON, gzipped, as `torch.cuda.memory._snapshot` describes it; torch's own file of it
would be a pickle.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.utils.files import opened, replace_text

MOST_EVENTS = 100_000
"""Newest allocations and frees that a history has; each takes a few hundred bytes."""


def write_snapshot(path: Path) -> None:
    """Write a snapshot to `path`, which ends in `.json.gz`, and torch's summary of it as a text
    next to it. Raises OSError."""
    import torch

    content = json.dumps(torch.cuda.memory._snapshot())
    with opened(path, "wb") as file, gzip.GzipFile(fileobj=file, mode="wb") as packed:
        packed.write(content.encode())
    name = f"{path.name.removesuffix('.json.gz')}.txt"
    replace_text(path.with_name(name), torch.cuda.memory_summary())


@contextlib.contextmanager
def memory_history() -> Iterator[None]:
    """Have snapshots say, of what is allocated and freed in the body, by which line it was. After
    an error it continues, so that a snapshot of it says so too."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")
    yield
    torch.cuda.memory._record_memory_history(enabled=None)
