"""What the keys of a LLaMA-Factory recipe become."""

from __future__ import annotations

import pytest

from tests.stages.importing.support import Case, assert_case, cases


@pytest.mark.parametrize("case", cases("llama_factory"))
def test_keys(case: Case) -> None:
    assert_case(case)
