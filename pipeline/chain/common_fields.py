"""Fields that two stages have in common, and `takes`, if they take the same."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pipeline.chain.registry import Registry
from pipeline.contracts.signature import field_types, needs
from pipeline.errors import PluginError
from pipeline.recipe.nodes import TAKES


def common_fields(registry: Registry) -> Callable[[str, str], Collection[str]]:
    """A function of two stages' names: their fields of the same name, type and bounds; none where a
    stage is not known or cannot be loaded, which is a mistake of its own."""

    def common(first: str, second: str) -> Collection[str]:
        try:
            types = [field_types(registry.load(use)) for use in (first, second) if use in registry]
        except PluginError:
            return ()
        if len(types) < 2:
            return ()
        same = [name for name, kind in types[0].items() if types[1].get(name) == kind]
        return (
            [*same, TAKES] if needs(registry.load(first)) == needs(registry.load(second)) else same
        )

    return common
