"""Trainings that share processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.body import Case, train_cases
from tests.support.processes import GROUP_LIMIT, run_ranks


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """Train a case of the module's CASES, and with it all that its tests need of the same number of
    ranks and engine, one after another in the same processes; return the result of that case."""
    cases: dict[str, Case] = request.module.CASES
    own = [item for item in request.session.items if item.fspath == request.node.fspath]
    names = {item.callspec.params.get("name") for item in own if hasattr(item, "callspec")}
    known: dict[str, Any] = {}

    def group(name: str) -> tuple[int, str]:
        case = cases[name]  # a process has one state of accelerate
        return case.ranks, name if case.wrap == "wrap.accelerate" else case.wrap

    def find(name: str) -> Any:
        if name not in known:
            wanted = [one for one in cases if one in names or one == name]
            alike = {one: cases[one] for one in wanted if group(one) == group(name)}
            folder = tmp_path_factory.mktemp("trained")
            found = run_ranks(train_cases, cases[name].ranks, str(folder), alike, limit=GROUP_LIMIT)
            known.update(found[0])
        return known[name]

    return find
