"""Several readers as one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from pipeline.artifacts import TensorReader, TensorSpec
from pipeline.errors import StageError

if TYPE_CHECKING:
    from torch import Tensor


class JoinedReader(TensorReader):
    """The tensors of all `readers`; of those that several have, the first's. Closes all."""

    def __init__(self, *readers: TensorReader) -> None:
        self._readers = readers
        self._owner: dict[str, TensorReader] = {}
        for reader in readers[::-1]:
            self._owner.update(dict.fromkeys(reader.names(), reader))

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """Of all."""
        return sum(reader.bytes_read for reader in self._readers)

    @property
    def as_stored(self) -> bool:  # type: ignore[override]
        """Of all."""
        return all(reader.as_stored for reader in self._readers)

    def names(self) -> Collection[str]:
        return self._owner.keys()

    def spec(self, name: str) -> TensorSpec:
        return self._reader(name).spec(name)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        return self._reader(name).chunks(name, start, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        self._reader(name).read_into(name, start, out)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _reader(self, name: str) -> TensorReader:
        if name not in self._owner:
            raise StageError(f"no tensor named {name}")
        return self._owner[name]
