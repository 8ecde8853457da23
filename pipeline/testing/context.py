"""A context to call a stage's `run` with, outside of any run."""

from __future__ import annotations

import logging
from pathlib import Path

from pipeline.dist import Dist
from pipeline.metrics import Metrics
from pipeline.stage import Context


def context(run_dir: str | Path, *, seed: int = 0, dist: Dist | None = None) -> Context:
    """The context of one CPU process without a process group, or of `dist`.

    `run_dir` is made if need be. Rank 0's metrics go to its `metrics.jsonl`; what is logged goes to
    the logger `pipe.testing`. Calls registered with `on_exit` are not made.
    """
    import torch

    place = dist or Dist(device=torch.device("cpu"))
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return Context(
        run_dir=folder,
        seed=seed,
        dist=place,
        log=logging.getLogger("pipe.testing"),
        metrics=Metrics(folder / "metrics.jsonl" if place.is_main else None),
    )
