"""Configuration files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages.importing.configs.written import write_configs


@pytest.fixture(scope="session")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the configurations that `configs/` has as text."""
    folder = tmp_path_factory.mktemp("configs")
    write_configs(folder)
    return folder
