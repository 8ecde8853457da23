"""Items prepared ahead by threads, in the order in which they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Prefetch(Generic[K, T]):
    """Prepares the items of the keys that follow the one that was asked for last."""

    def __init__(
        self, workers: int, prepare: Callable[[K], T], following: Callable[[K], Iterator[K]]
    ) -> None:
        """`workers` threads call `prepare` for a key. `following` gives the keys from the given one
        on, that one first; it is called and read by the thread that takes items."""
        self._pool = ThreadPoolExecutor(workers, "pipe-feed")
        self._ahead = workers + 1  # one is ready while each thread has one in hand
        self._prepare, self._following = prepare, following
        self._keys: Iterator[K] = iter(())
        self._begun: deque[tuple[K, Future[T]]] = deque()

    def take(self, key: K) -> T:
        """The item of a key; raises what `prepare` or `following` raised for it. Items of other
        keys that were begun are dropped, if this one is not the next."""
        if not self._begun or self._begun[0][0] != key:
            self._drop()
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

    def _drop(self) -> None:
        for _, future in self._begun:
            future.cancel()
        self._begun.clear()
