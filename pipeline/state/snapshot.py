"""The training process's way of handing its share of the state to its writer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.state import randomness
from pipeline.state.arena import Arena
from pipeline.state.dtypes import dtype
from pipeline.state.planning import Plan, random_key
from pipeline.state.staging import Copy, Staging
from pipeline.state.writer import Job, Outcome
from pipeline.state.writer_process import WriterProcess

if TYPE_CHECKING:
    from pipeline.dist import Dist
    from pipeline.engine import Engine, Fragment


class Snapshot:
    """Copies into an arena what an engine holds at one moment."""

    def __init__(self, engine: Engine, dist: Dist, plan: Plan, staging: Staging) -> None:
        self._engine = engine
        self._dist = dist
        self._staging = staging
        self._dtypes = {entry.key: dtype(entry.dtype) for entry in plan.tensors}
        self._whole = {
            key: list(copies)
            for key, copies in groupby(sorted(staging.whole), key=lambda copy: copy.key)
        }
        self.arena = Arena(staging.size)
        for place, head in staging.heads:
            self.arena.memory[place : place + len(head)] = head

    def hand_over(self, writer: WriterProcess, job: Job) -> Outcome | None:
        """Have the writer carry out `job`. Returns when the state may change; with the outcome if
        writing has failed by then."""
        with torch.no_grad():
            self._copy_whole()
            number = 0
            for copy, part, source in self._passing():
                while number < copy.round:
                    outcome = self._pass_on(writer, job, number)
                    if outcome is not None:
                        return outcome
                    number += 1
                self._copy(copy, part, source)
        last = len(self._staging.rounds) - 1
        assert number == last, "the last round passes nothing"
        return self._pass_on(writer, job, number)

    def _pass_on(self, writer: WriterProcess, job: Job, number: int) -> Outcome | None:
        """Tell the writer of a round; wait until there is room for the next."""
        if number == 0:
            writer.begin(job)
        else:
            writer.go_on()
        following = number + 1
        wanted = 2 <= following < len(self._staging.rounds)
        return writer.wait_taken() if wanted else None

    def _copy_whole(self) -> None:
        for name, state in randomness.capture(self._dist.device).items():
            key = random_key(self._dist.rank, name)
            source = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            for copy in self._whole[key]:
                self._target(copy).copy_(source[copy.start : copy.stop])
        if all(key.startswith("random/") for key in self._whole):
            return
        for part, kind, tensor in self._tensors():
            for copy in self._whole.get(f"{kind}/{part.name}", ()):
                if part.start <= copy.start and copy.stop <= part.stop:
                    self._copy(copy, part, tensor)

    def _passing(self) -> Iterator[tuple[Copy, Fragment, Tensor]]:
        """Passing pieces, in order. An engine tells its fragments in an order of its own, so it is
        asked as often as it takes; once, where all are of one dtype and optimizer group."""
        left = self._staging.passing[::-1]
        while left:
            before = len(left)
            for part, kind, tensor in self._tensors():
                key = f"{kind}/{part.name}"
                while left and left[-1].key == key and part.start <= left[-1].start < part.stop:
                    yield left.pop(), part, tensor
                if not left:
                    return
            assert len(left) < before, f"{left[-1].key} is not there any more"

    def _tensors(self) -> Iterator[tuple[Fragment, str, Tensor]]:
        for part in self._engine.fragments():
            for kind, tensor in part.state.items():
                yield part, kind, tensor

    def _copy(self, copy: Copy, part: Fragment, tensor: Tensor) -> None:
        _copy(self._target(copy), tensor[copy.start - part.start : copy.stop - part.start])

    def _target(self, copy: Copy) -> Tensor:
        kind = self._dtypes[copy.key]
        size = (copy.stop - copy.start) * kind.itemsize
        memory = self.arena.memory[copy.place : copy.place + size]
        return torch.frombuffer(memory, dtype=kind)

    def close(self) -> None:
        """Give the memory back."""
        self.arena.close()


def _copy(target: Tensor, source: Tensor) -> None:
    """Both flat and of one dtype. In host memory the C library copies faster than torch."""
    if source.device.type == "cpu" and source.is_contiguous() and source.dtype == target.dtype:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel() * target.itemsize)
    else:
        target.copy_(source)
