"""What a forecast says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.forecast.ledger import Peak
from pipeline.forecast.placement import Copies, Traffic
from pipeline.length import Length


@dataclass(frozen=True, kw_only=True)
class Work:
    """Arithmetic of one rank in an optimizer step, in floating-point operations."""

    useful: float
    """Of the model, forward and backward."""
    again: float
    """Of what is computed a second time."""

    @property
    def total(self) -> float:
        """All that is done."""
        return self.useful + self.again


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step, as the stage that trains has counted it."""

    microbatches: int
    """Of each rank."""
    tokens: int
    """Over all ranks, padding counted."""
    work: Work
    moved: int
    """Bytes that one rank's device reads from and writes to its memory: every tensor that is made
    once each way, and what the optimizer updates. Products read more."""
    samples: int = 0
    """Over all ranks."""
    copies: Copies = field(default_factory=Copies)
    """Of activations, on one rank."""
    length: Length = field(default_factory=Length)
    """Of the training that it is a step of."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Files that a stage writes."""

    what: str
    bytes: int
    formula: str


@dataclass(frozen=True, kw_only=True)
class Host:
    """Host memory of one node that a stage takes at some time, beyond what the ledger says."""

    phase: str
    """Empty: in all of them from when the model is loaded."""
    what: str
    bytes: int
    formula: str


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What a stage needs beside the step: gives for slots that save, export and the like.
    `Extras()` says that it needs nothing to speak of."""

    storage: Sequence[Storage] = ()
    saved: Callable[[Length], Storage] | None = None
    """Files of which a longer training leaves more."""
    host: Sequence[Host] = ()
    caveats: Sequence[str] = ()
    """What this arithmetic leaves out of account."""

    def files(self, length: Length) -> Iterator[Storage]:
        """All that is written in a training of that length."""
        yield from self.storage
        if self.saved is not None:
            yield self.saved(length)


@dataclass(frozen=True, kw_only=True)
class Exported(Extras):
    """Of a slot that exports."""

    loaded: int
    """Bytes of the model in memory, as others load it."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Of one recipe on one site. Bytes."""

    device: Mapping[str, Peak]
    """Phase -> what the fullest rank's device holds at its peak."""
    host: Mapping[str, Peak]
    """Phase -> what the fullest node's memory holds at its peak, files' cache not counted."""
    disk: Mapping[str, int]
    """Offloaded state on one node's disk, by item."""
    storage: Sequence[Storage]
    formulas: Mapping[str, str]
    """Item -> how it comes about."""
    traffic: Sequence[Traffic]
    copies: Copies
    step: Step | None
    caveats: Sequence[str] = field(default_factory=tuple)

    @property
    def peak(self) -> int:
        """Of device memory over all phases."""
        return max((peak.bytes for peak in self.device.values()), default=0)

    @property
    def host_peak(self) -> int:
        """Of host memory over all phases."""
        return max((peak.bytes for peak in self.host.values()), default=0)
