"""One consolidated training state: a file of weights that other tools load, a file of the rest.

All ranks write their parts of the same files; no rank ever holds a whole tensor that it does not
train whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

from pipeline.engine import WEIGHT
from pipeline.state.manifest import DataFile, TensorEntry
from pipeline.state.planning import ALIGN, Format, Layout
from pipeline.state.safetensors_file import Entry, header
from pipeline.state.spans import Span
from pipeline.state.writer import NewFile, Write

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"


class Full(Format):
    """Whole tensors, each once: `model.safetensors` with the names of the source model,
    `optimizer.safetensors` and `random.safetensors` with keys."""

    name = "full"

    def lay_out(
        self, rank: int, mine: Sequence[Span], tensors: Mapping[str, TensorEntry]
    ) -> Layout:
        content: dict[str, list[TensorEntry]] = defaultdict(list)
        for tensor in sorted(tensors.values(), key=lambda tensor: -tensor.itemsize):
            content[_file(tensor.key)].append(tensor)
        names = sorted(content)
        heads = {name: _head(content[name]) for name in names}
        offsets: dict[str, tuple[int, int]] = {}
        files, described = [], []
        for number, name in enumerate(names):
            end = len(heads[name])
            for tensor in content[name]:
                offsets[tensor.key] = number, end
                end += tensor.numel * tensor.itemsize
            files.append(NewFile(name=name, size=end, shared=True))
            described.append(
                DataFile(
                    name=name,
                    size=end,
                    data_start=len(heads[name]),
                    header=xxh3_64_intdigest(heads[name]),
                )
            )
        place, written, writes = 0, [], []
        if rank == 0:
            for number, name in enumerate(names):
                written.append((place, heads[name]))
                writes.append(Write(number, 0, place, len(heads[name]), False))
                place += len(heads[name])
        pieces, copies = [], defaultdict(list)
        for span in sorted(mine, key=lambda span: offsets[span.key][0]):
            number, begin = offsets[span.key]
            itemsize = tensors[span.key].itemsize
            offset, size = begin + span.start * itemsize, (span.stop - span.start) * itemsize
            writes.append(Write(number, offset, place, size, True))
            pieces.append((span, names[number], offset))
            copies[span.key].append((span.start, span.stop, place))
            place += size
        return Layout(
            files=files,
            described=described if rank == 0 else [],
            heads=written,
            writes=writes,
            pieces=pieces,
            copies=copies,
            size=place,
        )


def _file(key: str) -> str:
    kind = key.partition("/")[0]
    return {WEIGHT: WEIGHTS, "random": RANDOM}.get(kind, OPTIMIZER)


def _head(tensors: Sequence[TensorEntry]) -> bytes:
    entries = [
        Entry(
            name=tensor.key.removeprefix(f"{WEIGHT}/"),
            dtype=tensor.dtype,
            shape=tensor.shape,
            size=tensor.numel * tensor.itemsize,
        )
        for tensor in tensors
    ]
    return header(entries, metadata={"format": "pt"}, align=ALIGN)
