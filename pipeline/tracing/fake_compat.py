"""Operations that tensors without values cannot answer; a test guards torch's names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from pipeline.errors import StageError


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """Raises StageError where the body needs values."""
    try:
        yield
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    ) as error:
        raise StageError(
            f"this cannot be traced: it came to {error}, whose result depends on values, and "
            "tensors have none in a trace",
            hint="leave out --trace",
        ) from error
