"""Strategies by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.chain.registry import Entry, Registry
from pipeline.errors import PluginError, UsageError
from pipeline.planning.planner import Planners, Preset, chosen, strategies


@pytest.mark.usefixtures("fake_planners")
def test_strategies_are_what_installed_stages_offer(registry: Registry) -> None:
    found = strategies(registry)  # broken stages are skipped
    assert {name: (one.use, dict(one.fields)) for name, one in found.items()} == {
        "blue": ("wrap.blue", {}),
        "red1": ("wrap.red", {"stage": 1}),
        "red2": ("wrap.red", {"stage": 2}),
    }


def test_built_in_strategies() -> None:
    found = strategies(Registry.installed())
    wanted = {"ddp", "fsdp", "fsdp-shard-grad-op", "fsdp-hybrid", "zero1", "zero2", "zero3"}
    assert wanted | {"zero3-offload"} <= set(found)
    assert found["zero2"].fields == {"stage": 2}


@pytest.mark.usefixtures("fake_planners")
def test_an_unknown_strategy(registry: Registry) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(["blue", "red3"], registry)
    assert str(caught.value) == "there is no strategy `red3` (did you mean `red2`?)"


@pytest.mark.usefixtures("fake_planners")
def test_two_stages_of_one_strategy(fake_entry: Callable[..., Entry]) -> None:
    registry = Registry([fake_entry("wrap.blue", "Blue"), fake_entry("wrap.navy", "Blue", "other")])
    with pytest.raises(PluginError, match=r"`blue` is offered by wrap\.blue and by wrap\.navy"):
        strategies(registry)


@pytest.mark.usefixtures("fake_planners")
def test_presets_that_are_none(
    fake_entry: Callable[..., Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry([fake_entry("wrap.blue", "Blue", "other")])
    planner = Planners.installed().find("wrap.blue")
    monkeypatch.setattr(planner, "presets", lambda: {"b": Preset(fields={"bukket": 1})})
    with pytest.raises(PluginError) as caught:
        strategies(registry)
    assert str(caught.value) == (
        "stage `wrap.blue` of other 1.0: its preset `b` has fields that it has not"
    )
