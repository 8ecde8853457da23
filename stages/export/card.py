"""The model card: what a person who finds the folder wants to know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.run import rundir
from pipeline.utils.text import human

if TYPE_CHECKING:
    from pipeline.contracts.model import ModelSource
    from pipeline.contracts.stage import Context
    from pipeline.contracts.training import TrainedRun
    from stages.export.plan import ExportPlan

CARD = "README.md"


def facts_of(
    ctx: Context, source: ModelSource, plan: ExportPlan, trained: TrainedRun | None
) -> dict[str, str]:
    """What is known of the model and the run, one line each."""
    tensors = [tensor for part in plan.parts for tensor in part.tensors]
    size = human(sum(tensor.size for tensor in tensors))
    run = _run(ctx, trained)
    facts = {
        "name": plan_name(run, source),
        "architecture": type(plan.outline).__name__,
        "trained from": Path(source.name).name,
        "weights": f"{len(tensors)} tensors, {size}, {plan.dtype}",
    }
    own = {} if run is None else {"run": run.name, "seed": str(ctx.seed)}
    return facts | own | _training(trained) | _strategy(run) | _versions(run)


def plan_name(run: Path | None, source: ModelSource) -> str:
    """What to call the model."""
    return run.name if run is not None else Path(source.name).name


def _run(ctx: Context, trained: TrainedRun | None) -> Path | None:
    """The run that trained the model: this one, or that which saved the checkpoint; None if that is
    not known."""
    if (ctx.run_dir / rundir.ENGINE).is_file():
        return ctx.run_dir
    folder = None if trained is None else Path(trained.checkpoint).parent.parent
    return folder if folder is not None and (folder / rundir.ENGINE).is_file() else None


def _training(trained: TrainedRun | None) -> dict[str, str]:
    if trained is None:
        return {}
    progress = trained.progress
    facts = {
        "steps": f"{progress.step:,}",
        "samples": f"{progress.samples:,}",
        "target tokens": f"{progress.tokens:,}",
    }
    return facts | {name: f"{value:.6g}" for name, value in progress.metrics.items()}


def _strategy(run: Path | None) -> dict[str, str]:
    if run is None:
        return {}
    try:
        engine = json.loads((run / rundir.ENGINE).read_text("utf-8"))
        return {"strategy": f"{engine['engine']} on {engine['world_size']} processes"}
    except (OSError, ValueError, KeyError):
        return {}


def _versions(run: Path | None) -> dict[str, str]:
    """With which the run was last started."""
    if run is None:
        return {}
    try:
        packages = json.loads((run / rundir.ENVIRONMENT).read_text("utf-8"))["packages"]
        return {"made with": ", ".join(f"{name} {v}" for name, v in packages.items())}
    except (OSError, ValueError, KeyError):
        return {}


class Usage(NamedTuple):
    """How a folder is used, for its card."""

    library: str
    lines: str
    """Python that loads it."""


MODEL_USAGE = Usage(
    "transformers",
    """from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", dtype="auto")""",
)


def write_card(folder: Path, facts: Mapping[str, str], usage: Usage) -> None:
    """Write the CARD with one line per fact, under the `name`."""
    title = facts["name"]
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items() if name != "name")
    text = f"""---
library_name: {usage.library}
pipeline_tag: text-generation
---

# {title}

{lines}

```python
{usage.lines}
```

`pipe verify` proves again that the files are whole and compute what they did.
"""
    (folder / CARD).write_text(text, encoding="utf-8")
