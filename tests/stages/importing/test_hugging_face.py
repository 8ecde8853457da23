"""What the keys of accelerate's, DeepSpeed's and the Trainer's files become."""

from __future__ import annotations

import pytest

from tests.stages.importing.support import Case, assert_case, cases


@pytest.mark.parametrize("case", cases("trainer", "engines"))
def test_keys(case: Case) -> None:
    assert_case(case)
