from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


# Makes the benchmarks' modules importable; they are in no package.
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(scope="session", autouse=True)
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the profiles of tests apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPE_PROFILES", str(tmp_path_factory.mktemp("profiles")))
        yield
