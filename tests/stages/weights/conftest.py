"""Small chunks and one folder for the tests of a file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.weights import files, views


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    """Let small tensors take several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "CHUNK", 48)
        patch.setattr(files, "CHUNK", 48)
        yield


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)
