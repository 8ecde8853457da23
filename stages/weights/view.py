"""What readers that look at another reader have in common."""

from __future__ import annotations

from pipeline.artifacts import TensorReader


class ReaderView(TensorReader):
    """Tensors of `base`, seen in another way. Leaves `base` open."""

    def __init__(self, base: TensorReader) -> None:
        self._base = base

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """Of the base."""
        return self._base.bytes_read

    @property
    def as_stored(self) -> bool:  # type: ignore[override]
        """Of the base."""
        return self._base.as_stored
