"""`metrics.jsonl`: one JSON object a line, written by rank 0."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.utils import foreign
from pipeline.utils.files import opened, replace_text
from pipeline.utils.foreign import BLOCK, is_number, is_text, open_regular
from pipeline.utils.text import plural


@dataclass(eq=False)
class Metrics:
    """Append-only metrics of a run. A path of None makes every call do nothing (ranks above 0)."""

    path: Path | None
    training: str = ""
    """Slot that the records are of; empty for a recipe's first training."""

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, on its way to the disk when this returns: an integer `step`, and what
        was measured there. Every number gets a curve in reports, a line in displays, and is sent to
        trackers. Numbers of NumPy and tensors of one element are taken; what is not finite becomes
        null. Raises TypeError for a record without a step, or with what JSON cannot hold, and
        ValueError for a name that the training uses (FIELDS), whose numbers it would be mixed with.
        """
        taken = sorted(record.keys() & (OWN - {"step", "time"}))
        if taken:
            raise ValueError(f"`{taken[0]}` is a name of the training's numbers: choose another")
        self.write_training(record)

    def write_training(self, record: dict[str, Any]) -> None:
        """Append one record of a stage that trains: as `write`, with the names in FIELDS too."""
        if self.path is not None:
            plain = dict[str, Any]()
            for name, value in record.items():
                # of another library: NumPy's, or a tensor
                foreign_number = not isinstance(value, (str, list, dict)) and hasattr(value, "item")
                own = value.item() if foreign_number else value
                plain[name] = None if isinstance(own, float) and not math.isfinite(own) else own
            plain |= {"slot": self.training} if self.training else {}
            if type(plain.get("step")) is not int:
                raise TypeError(f"a record of metrics needs an integer `step`: {record!r}")
            foreign.append_line(self.path, plain)

    def write_length(self, step: int, total: int) -> None:
        """Append the number of steps of the whole training, unless the file has it already."""
        if self.path is not None:
            own = (one for one in records(self.path) if record_training(one) == self.training)
            known = [one["total_steps"] for one in own if one.get("total_steps")]
            if known[-1:] != [total]:
                self.write_training({"step": step, "time": time.time(), "total_steps": total})

    def rewind(self, step: int) -> None:
        """Drop the training's records later than `step`, and a line that a crash cut short: no gaps
        or duplicates after a resume. A file with other lines than ours is kept aside."""
        if self.path is None or not self.path.exists():
            return
        found = list(records(self.path))
        with open_regular(self.path, within=self.path.parent) as file:
            lines = sum(part.count(b"\n") for part in iter(lambda: file.read(BLOCK), b""))
            if (left_out := lines - len(found)) > 0:
                aside = self.path.with_name(f"{self.path.name}.damaged")
                file.seek(0)
                with opened(aside, "wb") as copy:
                    shutil.copyfileobj(file, copy)
                message = "%s: left out %s without metrics; kept in %s"
                logging.getLogger("pipe").warning(
                    message, self.path, plural(left_out, "line"), aside
                )
        kept = [
            record for record in found
            if record_training(record) != self.training or (record.get("step") or 0) <= step
        ]  # fmt: skip
        replace_text(self.path, "".join(json.dumps(r, allow_nan=False) + "\n" for r in kept))


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a metrics file, in order, without foreign and incomplete lines."""
    return (record for record in foreign.read_lines(path) if is_record(record))


def record_training(record: Mapping[str, Any]) -> str:
    """The slot of the training that a record is of; empty for the recipe's first."""
    return str(record.get("slot", ""))


def is_record(record: dict[str, Any]) -> bool:
    """Whether it has a step, and what its readers use is of the kind that they expect."""
    steps = (record.get("step"), record.get("best_step", 0) or 0)
    texts = record.get("generated", [])
    return (
        all(type(value) is int and is_number(value) for value in steps)
        and all(record.get(name) is None or is_number(record[name]) for name in NUMBERS)
        and all(type(value) is not int or is_number(value) for value in record.values())
        and all(is_text(record.get(name, "")) for name in ("ended_early", "slot"))
        and isinstance(texts, list)
        and all(isinstance(one, dict) and type(one.get("number")) is int for one in texts)
        and all(is_number(one["number"]) for one in texts)
        and all(is_text(one.get(name)) for one in texts for name in ("prompt", "text"))
    )


FIELDS = {
    "anomaly": (
        "anomaly", "action", "anomalous_step", "anomalous_loss", "samples_from", "samples_to",
    ),
    "straggler": ("straggler", "share", "why"),
    "generated": ("generated",),
    "ended early": ("ended_early",),
    "checkpoint written": (
        "checkpoint_seconds", "checkpoint_bytes", "checkpoint_user_seconds",
        "checkpoint_system_seconds", "checkpoint_slowed_seconds",
    ),
    "checkpoint": ("checkpoint_stall_seconds",),
    "evaluation": ("eval_loss", "perplexity"),
    "step": (
        "loss", "grad_norm", "lr", "tokens", "samples", "applied", "loss_scale", "step_seconds",
        "tokens_per_second", "tokens_per_second_per_rank", "target_tokens_per_second",
        "samples_per_second", "data_wait_share", "mfu", "peak_memory_bytes",
        "peak_host_memory_bytes", "profiled", "compute_share", "communication_share", "data_share",
        "idle_share",
    ),
    "training length": ("total_steps",),
    "other": ("step", "time", "slot", "best_step", "best_eval_loss"),
}  # fmt: skip
"""Kind of record -> the fields that the training writes into it. The first tells the kind, as no
record before it in this order has it; fields of `other` place a record, and measure nothing. A
field that is missing here counts as a plugin's number, with its own curve, line and tracker
series."""
KINDS = {fields[0]: kind for kind, fields in FIELDS.items() if kind != "other"}
"""Key that tells a kind of record -> the kind."""
OWN = frozenset(name for fields in FIELDS.values() for name in fields)
"""All fields that the training writes."""
NUMBERS = OWN - {
    "step", "slot", "best_step", "applied", "profiled", "anomaly", "action", "why", "generated",
    "ended_early",
}  # fmt: skip
"""Fields that are numbers, or null."""
UNSENT = {*FIELDS["other"], "straggler", "total_steps"}
"""Numbers that measure nothing."""


def kind_of(record: Mapping[str, Any]) -> str:
    """Return what a record is of: a step, an evaluation, a checkpoint or something else."""
    return next((kind for key, kind in KINDS.items() if key in record), "other")


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield names and values of a record's numbers, without true and false."""
    for name, value in record.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)
