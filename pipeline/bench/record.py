"""A benchmark as JSON: `bench.json`, and what `--json` prints."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

from pipeline import rundir
from pipeline.bench.results import Row
from pipeline.bench.session import Session
from pipeline.bench.verdict import verdict
from pipeline.files import replace_text

SCHEMA_VERSION = 1
FILE = "bench.json"
PLAIN = (
    "steps_left_out", "tokens_per_step", "samples_per_step", "data_wait_share",
    "communication_share", "first_step_seconds", "checkpoint_seconds", "checkpoint_stall_seconds",
)  # fmt: skip
"""Names of `Measured` that JSON has too."""


def as_json(session: Session, rows: Sequence[Row], plot: str | None = None) -> str:
    """The rows that there are; `plot` is the picture's file, if it is drawn."""
    content = {
        **_head(session),
        "rows": [_row(row) for row in rows],
        "missing": session.missing(rows),
        "verdict": verdict(rows),
        "plot": plot,
    }
    return json.dumps(content, indent=1, allow_nan=False)


def save(session: Session, text: str) -> None:
    """Put it in place whole, or leave what is there. Raises OSError."""
    replace_text(session.folder / FILE, text + "\n")


def _head(session: Session) -> dict[str, Any]:
    plan, length = session.plan, session.length
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe": plan.recipe.name,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": plan.view.device,
        "scaling": "weak" if length.weak else "strong",
        "steps": length.steps,
        "warmup": length.warmup,
        "threads": session.threads,
        "packages": rundir.versions(),
        "folder": str(session.folder),
    }


def _row(row: Row) -> dict[str, Any]:
    """The same keys for one that failed, whose numbers are null."""
    m = row.measured
    return {
        "strategy": row.strategy, "use": row.use, "procs": row.procs,
        "error": row.error or None,
        "tokens_per_second": m and vars(m.tokens_per_second),
        "step_seconds": m and vars(m.step_seconds),
        "efficiency": row.efficiency, "efficiency_base": row.efficiency_base,
        "memory": m and {**vars(m.memory), "ratio": m.memory.ratio},
        **{name: m and getattr(m, name) for name in PLAIN},
    }  # fmt: skip
