"""Who writes which part of every tensor to which place; settled once a run, before the first save.

Every rank tells what it holds. All compute the same division of the work, and each lays out its own
files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_intdigest

from pipeline.errors import StageError
from pipeline.state import randomness
from pipeline.state.dtypes import code
from pipeline.state.manifest import DataFile, Piece, TensorEntry
from pipeline.state.safetensors_file import ITEM_BYTES, Entry, header
from pipeline.state.spans import Misfit, Span, require_cover, share_writing
from pipeline.state.writer import NewFile, Write

if TYPE_CHECKING:
    from pipeline.dist import Dist
    from pipeline.engine import Engine

ALIGN = 4096
"""Data of a file begins at a multiple of this."""


class Holding(NamedTuple):
    """Elements [start, stop) of a tensor that a rank holds."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What one rank writes, and where it comes from."""

    files: Sequence[NewFile]
    described: Sequence[DataFile]
    """Of these files, those whose head this rank writes."""
    heads: Sequence[tuple[int, bytes]]
    """Bytes at places of the arena that are the same at every save."""
    writes: Sequence[Write]
    pieces: Sequence[tuple[Span, str, int]]
    """Each piece in the order of `writes`: what, in which file, at which byte."""
    copies: Mapping[str, Sequence[tuple[int, int, int]]]
    """Key -> (start, stop, place in the arena) of the parts that this rank writes."""
    size: int
    """Bytes of the arena."""


class Arrangement(ABC):
    """How the pieces that a rank writes are put into files."""

    name: str

    @abstractmethod
    def lay_out(
        self, rank: int, mine: Sequence[Span], tensors: Mapping[str, TensorEntry]
    ) -> Layout:
        """The files of `rank`, which writes `mine`; `tensors` are those of all ranks in order."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A rank's layout, and what the manifest of every checkpoint says of all ranks'."""

    layout: Layout
    tensors: Sequence[TensorEntry]
    files: Sequence[DataFile]
    pieces: Sequence[Sequence[Piece]]
    """By rank; on rank 0 alone, as there can be millions."""


def make_plan(
    engine: Engine, dist: Dist, arrangement: Arrangement, without: Set[str] = frozenset()
) -> Plan:
    """Agree with all ranks (collective); parameters `without` are not written. Raises StageError
    when what ranks hold does not make up the tensors."""
    own = [*held(engine, without), *_random(dist)]
    everyone = [[Holding(*item) for item in rank] for rank in dist.gather(own)]
    tensors = _tensors(holding for rank in everyone for holding in rank)
    shares = share_writing([[Span(h.key, h.start, h.stop) for h in rank] for rank in everyone])
    _require_whole(shares, tensors)
    mine = sorted(shares[dist.rank], key=lambda span: -tensors[span.key].itemsize)
    layout = arrangement.lay_out(dist.rank, mine, tensors)
    told = dist.gather(
        [[file.model_dump() for file in layout.described], [list(p) for p in layout.pieces]]
    )
    files = [DataFile(**file) for described, _ in told for file in described]
    numbers = {file.name: number for number, file in enumerate(files)}
    places = {key: number for number, key in enumerate(tensors)}
    pieces = [
        [
            Piece(places[key], numbers[file], offset, start, stop)
            for (key, start, stop), file, offset in pieces
        ]
        for _, pieces in (told if dist.is_main else ())
    ]
    return Plan(layout=layout, tensors=list(tensors.values()), files=files, pieces=pieces)


def held(engine: Engine, without: Set[str] = frozenset()) -> list[Holding]:
    """What this rank's fragments are, but for those of parameters `without`."""
    return [
        Holding(f"{kind}/{part.name}", code(tensor.dtype), tuple(part.shape), part.start, part.stop)
        for part in engine.fragments()
        for kind, tensor in part.state.items()
        if tensor.numel() and part.name not in without
    ]


def random_key(rank: int, name: str) -> str:
    """Key of the state of a rank's generator."""
    return f"random/{rank:05d}/{name}"


def _random(dist: Dist) -> list[Holding]:
    return [
        Holding(random_key(dist.rank, name), "U8", (len(state),), 0, len(state))
        for name, state in randomness.capture(dist.device).items()
    ]


def _tensors(holdings: Iterable[Holding]) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for holding in holdings:
        entry = TensorEntry(key=holding.key, dtype=holding.dtype, shape=tuple(holding.shape))
        if found.setdefault(holding.key, entry) != entry:
            raise StageError(f"{holding.key}: ranks differ in its shape or dtype")
    return found


def _require_whole(shares: Sequence[Sequence[Span]], tensors: Mapping[str, TensorEntry]) -> None:
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for share in shares:
        for span in share:
            ranges[span.key].append((span.start, span.stop))
    for key, entry in tensors.items():
        try:
            require_cover(ranges[key], entry.numel)
        except Misfit as misfit:
            raise StageError(f"the ranks' parts of {key} do not make it up: {misfit}") from None


class Sharded(Arrangement):
    """One safetensors file a rank. A whole tensor has its shape and its key for a name; a part of
    one is flat and named `KEY@START`."""

    name = "sharded"

    def lay_out(
        self, rank: int, mine: Sequence[Span], tensors: Mapping[str, TensorEntry]
    ) -> Layout:
        file = f"rank-{rank:05d}.safetensors"
        entries = [_entry(span, tensors[span.key]) for span in mine]
        head = header(entries, metadata={"format": "pt"}, align=ALIGN)
        writes = [Write(0, 0, 0, len(head), False)]
        pieces, copies = [], defaultdict(list)
        place = len(head)
        for span, entry in zip(mine, entries, strict=True):
            writes.append(Write(0, place, place, entry.size, True))
            pieces.append((span, file, place))
            copies[span.key].append((span.start, span.stop, place))
            place += entry.size
        return Layout(
            files=[NewFile(name=file, size=place, shared=False)],
            described=[
                DataFile(
                    name=file, size=place, data_start=len(head), header=xxh3_64_intdigest(head)
                )
            ],
            heads=[(0, head)],
            writes=writes,
            pieces=pieces,
            copies=copies,
            size=place,
        )


def _entry(span: Span, tensor: TensorEntry) -> Entry:
    length = span.stop - span.start
    whole = length == tensor.numel
    return Entry(
        name=span.key if whole else f"{span.key}@{span.start}",
        dtype=tensor.dtype,
        shape=tensor.shape if whole else (length,),
        size=length * ITEM_BYTES[tensor.dtype],
    )
