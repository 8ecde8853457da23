"""torchtune's loggers of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.importing import rules
from stages.importing.rules import Table, sets
from stages.importing.tools import COMPONENT
from stages.importing.trackers import RECORDED, WANDB, named, other_tracker, own_run

FILES = ("disklogger", "stdoutlogger")
LOGGERS: Mapping[str, Table] = {
    "wandblogger": {
        COMPONENT: named("wandb"),
        **WANDB,
        **rules.each_way("id run_id resume", own_run),
        **rules.each_way("log_dir dir log_strategy", rules.passes("the run has a folder")),
    },
    "tensorboardlogger": {
        COMPONENT: named("tensorboard"),
        "log_dir": sets("tensorboard.folder", rules.path),
        "organize_logs": rules.passes("each run has its own folder"),
    },
}
"""Name in lower case -> rules of its block."""


def logger(block: Mapping[str, Any]) -> Table:
    """Return the rules of the block that names a logger."""
    name = str(block.get(COMPONENT, "")).rpartition(".")[2].lower()
    if name in FILES:
        return dict.fromkeys(block, rules.passes(RECORDED))
    return LOGGERS.get(name) or {
        **dict.fromkeys(block, rules.follows(COMPONENT)),
        COMPONENT: other_tracker,
    }
