"""One process of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from pipeline.dist import environment_dist
from pipeline.forecast.site import Site
from pipeline.plan import plan_file
from pipeline.tracing.run import measure, samples_of


def steps(settings: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell the peak of every phase, in bytes."""
    ranks, device, folder = settings["ranks"], settings["device"], Path(settings["folder"])
    store = torch.distributed.FileStore(settings["store"], ranks)  # type: ignore[attr-defined]
    here = environment_dist(store, device=device)
    plan = plan_file(settings["recipe"], [f"launch.device={device}"], forecast=True, procs=ranks)
    site = Site(ranks=ranks, local_ranks=ranks, device=device)
    own = folder / f"rank-{here.rank}"
    own.mkdir()
    tell(measure(plan, site, samples_of(plan, site), here, own))
    torch.distributed.destroy_process_group()
