from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


# Modules of benchmarks, which are no part of any package, can be imported.
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(scope="session", autouse=True)
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles of tests are kept apart from those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPE_PROFILES", str(tmp_path_factory.mktemp("profiles")))
        yield
