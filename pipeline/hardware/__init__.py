"""GPUs by their data sheets, and memory and cores of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.packages import lazily

if TYPE_CHECKING:
    from pipeline.hardware.gpus import find_accelerator as find_accelerator
    from pipeline.hardware.host import cores_each as cores_each
    from pipeline.hardware.host import free_memory as free_memory
    from pipeline.hardware.host import model_begins as model_begins
    from pipeline.hardware.host import peak_beyond as peak_beyond
    from pipeline.hardware.memory_compat import memory_history as memory_history
    from pipeline.hardware.memory_compat import write_snapshot as write_snapshot
else:
    __getattr__, __dir__ = lazily(__name__, __file__)
