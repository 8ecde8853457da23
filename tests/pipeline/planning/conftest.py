from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the profiles of tests apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPE_PROFILES", str(tmp_path_factory.mktemp("profiles")))
        yield
