"""The model card: what a person who finds the folder wants to know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import rundir
from pipeline.throughput import human

if TYPE_CHECKING:
    from pipeline.artifacts import ModelSource, TrainedRun
    from pipeline.stage import Context
    from stages.export.plan import ExportPlan


def facts_of(
    ctx: Context, source: ModelSource, plan: ExportPlan, trained: TrainedRun | None
) -> dict[str, str]:
    """What is known of the model and the run, one line each."""
    tensors = [tensor for part in plan.parts for tensor in part.tensors]
    size = human(sum(tensor.size for tensor in tensors))
    facts = {
        "architecture": type(plan.outline).__name__,
        "trained from": Path(source.name).name,
        "run": ctx.run_dir.name,
        "seed": str(ctx.seed),
        "weights": f"{len(tensors)} tensors, {size}, {plan.dtype}",
    }
    return facts | _training(trained) | _strategy(ctx.run_dir) | _versions()


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


def _strategy(run_dir: Path) -> dict[str, str]:
    try:
        engine = json.loads((run_dir / rundir.ENGINE).read_text("utf-8"))
        return {"strategy": f"{engine['engine']} on {engine['world_size']} processes"}
    except (OSError, ValueError, KeyError):
        return {}


def _versions() -> dict[str, str]:
    return {"made with": ", ".join(f"{name} {v}" for name, v in rundir.versions().items())}


def write_card(folder: Path, title: str, facts: Mapping[str, str]) -> None:
    """Write README.md with one line per fact."""
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    text = f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {title}

{lines}

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", dtype="auto")
```

`pipe verify` proves again that the files are whole and compute what they did.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")
