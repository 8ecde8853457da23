"""GPUs by their data sheets, and memory and cores of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.lazy import lazily

if TYPE_CHECKING:
    from pipeline.hardware.gpus import find_accelerator
    from pipeline.hardware.host import cores_each, free_memory, model_begins, peak_beyond
    from pipeline.hardware.memory_compat import memory_history, write_snapshot
else:
    __getattr__ = lazily(__name__, __file__)
