"""After a training: the memory that was predicted, and what it took."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.accelerators import GIB
from pipeline.files import replace_text
from pipeline.metrics import records
from pipeline.planning.memory_plan import estimated
from pipeline.planning.topology import Topology

if TYPE_CHECKING:
    from pipeline.plan import Plan
    from pipeline.stage import Context

FILE = "memory.json"
MEASURED = {"cuda": "peak_memory_bytes", "cpu": "peak_host_memory_bytes"}
"""Device -> the measure of it in `metrics.jsonl`: tensors on the fullest GPU, or what the model and
its training took of host memory on the fullest rank."""

WHAT = {
    "cuda": "tensors on a GPU",
    "cpu": "resident beyond the libraries, with what the C library keeps of freed memory",
}


def tell(plan: Plan, ctx: Context) -> None:
    """Write `memory.json` in the run's folder and say it in a line. Never fails a training that has
    come to its end: what cannot be told is a warning."""
    try:
        found = compare(plan, ctx)
        if found is not None:
            _tell(found, ctx)
    except Exception as error:
        ctx.log.warning("its memory cannot be compared with a prediction: %s", error)


def _tell(found: Mapping[str, Any], ctx: Context) -> None:
    replace_text(ctx.run_dir / FILE, json.dumps(found, indent=1) + "\n")
    predicted, measured = found["predicted_bytes"], found["measured_bytes"]
    if ctx.dist.device.type == "cpu":  # what the C library keeps is more than what is to be told
        ctx.log.info("memory of the fullest rank: %.2f GiB (%s)", measured / GIB, found["what"])
        return
    ctx.log.info(
        "memory of the fullest rank: %.2f GiB predicted (%s), %.2f GiB measured (%s): %+.1f %%",
        predicted / GIB, found["phase"], measured / GIB, found["what"],
        100 * (measured / predicted - 1),
    )  # fmt: skip


def compare(plan: Plan, ctx: Context) -> dict[str, Any] | None:
    """Bytes of the fullest rank; None where nothing was measured. Raises PipeError where nothing
    can be predicted."""
    device = ctx.dist.device.type
    measured = _measured(ctx.metrics.path, MEASURED[device])
    if measured is None:
        return None
    dist = ctx.dist
    topology = Topology(ranks=dist.world_size, local_ranks=dist.local_world_size, device=device)
    estimate = estimated(plan, topology)
    phase, peak = max(estimate.device.items(), key=lambda item: item[1].bytes)
    return {
        "what": WHAT[device],
        "phase": phase,
        "predicted_bytes": peak.bytes,
        "measured_bytes": measured,
        "predicted_items": dict(peak.items),
        "not_counted": list(estimate.caveats),
    }


def _measured(file: Path | None, name: str) -> int | None:
    """The newest record's measure."""
    found: Mapping[str, Any] = {}
    for record in records(file) if file is not None and file.exists() else ():
        found = record if name in record else found
    return found.get(name)
