"""Fields that two stages have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pipeline.chain.registry import Registry
from pipeline.contracts.signature import field_types
from pipeline.errors import PluginError


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
        return [name for name, kind in types[0].items() if types[1].get(name) == kind]

    return common
