"""Stages that save and resume, and the door for authors of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils import lazily

if TYPE_CHECKING:
    from stages.checkpoint.sharded import DerivedCheckpoints as DerivedCheckpoints
    from stages.checkpoint.sharded import ShardedCheckpoint as ShardedCheckpoint
else:
    __getattr__, __dir__ = lazily(__name__, __file__)
