"""Numbers on their way from a device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a small tensor that the device sends to the host once it has computed it, so that
    the host can go on until it needs the numbers."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._sent = values, None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()

    def __float__(self) -> float:
        """The only element, as `read` returns it."""
        (value,) = self.read()
        return value

    def read(self) -> list[float]:
        """Return all elements. The host waits if the device has not computed them."""
        if self._sent is not None:
            self._sent.synchronize()
        found: list[float] = self._values.reshape(-1).tolist()
        return found
