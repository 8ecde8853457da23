"""Micro-batches on their way to the device while it computes: prepared ahead, and copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pipeline import MicroBatch

K = TypeVar("K")
T = TypeVar("T")


class Prefetch(Generic[K, T]):
    """Prepares the items of the keys that follow the one that was asked for last, in threads."""

    def __init__(
        self, workers: int, prepare: Callable[[K], T], following: Callable[[K], Iterator[K]]
    ) -> None:
        """`workers` threads call `prepare` for a key. `following` yields the keys from the given
        one on, that one first; it is called and read by the thread that takes items."""
        self._pool = ThreadPoolExecutor(workers, "pipe-feed")
        self._ahead = workers + 1  # one is ready while each thread has one in hand
        self._prepare, self._following = prepare, following
        self._keys: Iterator[K] = iter(())
        self._begun: deque[tuple[K, Future[T]]] = deque()

    def take(self, key: K) -> T:
        """The item of a key; raises what `prepare` or `following` raised for it. Items of other
        keys that were begun are dropped, if this one is not the next."""
        if not self._begun or self._begun[0][0] != key:
            for _, future in self._begun:
                future.cancel()
            self._begun.clear()
            self._keys = self._following(key)
            self._begin(next(self._keys))
        _, future = self._begun.popleft()
        taken = future.result()
        self._look_ahead()
        return taken

    def close(self) -> None:
        """Wait for items that are being prepared, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _look_ahead(self) -> None:
        while len(self._begun) < self._ahead:
            try:
                key = next(self._keys, None)
            except Exception:
                # Perhaps nobody asks for what is broken; who does is told then.
                self._keys = iter(())
                return
            if key is None:
                return
            self._begin(key)

    def _begin(self, key: K) -> None:
        self._begun.append((key, self._pool.submit(self._prepare, key)))


class Transfer:
    """Copies micro-batches to a device; to a GPU on a separate stream, from page-locked memory, so
    that neither the host nor the device waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def begin(self, batch: MicroBatch) -> Callable[[], MicroBatch]:
        """Begin to copy a micro-batch of the host; any thread may. The function that is returned
        hands the copy to the thread that computes: what it launches from then on waits for it."""
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
