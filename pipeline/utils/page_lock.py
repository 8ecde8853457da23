"""Memory of the host that a GPU reads and writes by itself."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def address(memory: memoryview) -> int:
    """The address of the first byte; 0 if there is none."""
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr() if memory else 0


class PageLock:
    """Locks pages of a buffer in memory for a GPU: copies then run at the link's speed, while the
    host continues. Taking new locked memory takes six times as long as locking pages that are
    there."""

    def __init__(self, memory: memoryview) -> None:
        """Lock the pages; without effect where the system allows no more of them."""
        self._address = address(memory)
        self.held = False
        """Whether the pages are locked."""
        if self._address:
            self.held = int(_runtime().cudaHostRegister(self._address, memory.nbytes, 0)) == 0
            if not self.held:
                # CUDA's last error is no failure, and the next kernel would be taken for its cause
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")

    def close(self) -> None:
        """Unlock the pages, once nothing is copied any more."""
        if self.held:
            with contextlib.suppress(RuntimeError):  # of a device that is lost
                torch.cuda.synchronize()
            _runtime().cudaHostUnregister(self._address)
            self.held = False
