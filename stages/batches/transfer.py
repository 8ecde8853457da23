"""Micro-batches on their way to a GPU, while it computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline import MicroBatch


class Transfer:
    """Copies micro-batches to a device; to a GPU on a stream of their own, from pages that stay
    where they are in memory, so that neither the host nor the device waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def begin(self, batch: MicroBatch) -> Callable[[], MicroBatch]:
        """Begin to copy a micro-batch of the host; any thread may. The function that is returned
        gives the copy to the thread that computes: what it launches from then on waits for it."""
        stream = self._stream
        if stream is None:
            there = batch.changed(lambda tensor: tensor.to(self._device))
            return lambda: there
        # Otherwise a thread would go back to the node's first GPU after the copy, and take memory
        # there.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(stream):
            there = batch.changed(
                lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True)
            )
            sent = stream.record_event()

        def received() -> MicroBatch:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(sent)
            # The memory is the copying stream's, which must not take it back before this one is
            # done with it.
            return there.changed(lambda tensor: _recorded(tensor, current))

        return received


def _recorded(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    tensor.record_stream(stream)
    return tensor
