"""Fixtures of the export tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.exports import Run, run_of
from tests.support.models import tiny_llama_config


@pytest.fixture
def llama(tmp_path: Path) -> Run:
    return run_of(tiny_llama_config(), tmp_path)
