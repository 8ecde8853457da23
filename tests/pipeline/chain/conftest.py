"""Plans of small recipes, with stages of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from pipeline.chain.plan import Plan, plan_file
from pipeline.chain.registry import Entry, Registry


class Planned(Protocol):
    def __call__(
        self, *overrides: str, text: str, stages: Mapping[str, type] = ..., **how: Any
    ) -> Plan: ...


@pytest.fixture
def planned(
    fake_entry: Callable[..., Entry],
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Planned:
    """Return a function that plans a recipe with the fake stages, and further ones by name."""
    import fake_stages

    monkeypatch.chdir(tmp_path)

    def make(
        *overrides: str, text: str, stages: Mapping[str, type] | None = None, **how: Any
    ) -> Plan:
        entries = registry.entries()
        for name, kind in (stages or {}).items():
            monkeypatch.setattr(fake_stages, kind.__name__, kind, raising=False)
            entries.append(fake_entry(name, kind.__name__, "somebody"))
        Path("r.yaml").write_text(text, encoding="utf-8")
        return plan_file("r.yaml", overrides, registry=Registry(entries), **how)

    return make
