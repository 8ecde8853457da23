"""Fixtures of the export tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.exports import Run, run_of
from tests.support.models import tiny_llama_config


@pytest.fixture
def llama(tmp_path: Path) -> Run:
    return run_of(tiny_llama_config(), tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export of `llama` in fp32."""
    return run_of(tiny_llama_config(), tmp_path_factory.mktemp("once")).export(dtype="fp32").folder


@pytest.fixture
def exported(llama: Run, finished: Path) -> Run:
    """Return `llama`, exported in fp32."""
    shutil.copytree(finished, llama.folder)
    return llama
