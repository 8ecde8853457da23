"""An optimizer's state as torch.distributed.checkpoint has it, by parameter."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.state.manifest import Group
from stages.formats.adam import SETTINGS, settings
from stages.formats.dcp_index import Item, Path_, StoredTensor, value_of

ROOT = "optimizer"
STEP = "step"
_BY_NUMBER = re.compile(r"(\d+)\.(\w+)")
_USED = (*SETTINGS, "initial_lr")


class DcpOptimizer:
    """Keys are `state.NAME.KIND`, and `param_groups.NAME.SETTING` or `param_groups.NUMBER.SETTING`,
    however they are nested. With `weights_only` it is asked for what was trained alone, and may be
    of any kind."""

    def __init__(self, items: Mapping[Path_, Item], where: str, *, weights_only: bool) -> None:
        self._where = where
        self._weights_only = weights_only
        self._groups: dict[str, Item] = {}
        self.moments: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        """Parameter -> kind -> tensor."""
        self._counts: dict[str, Item] = {}
        for path, item in items.items():
            if path[0] == ROOT:
                self._take(".".join(path[1:]), item)

    def updates(self) -> dict[str, int]:
        """Parameter -> steps applied to it."""
        found = {}
        for name in self.moments:
            if name not in self._counts:
                if self._weights_only:
                    continue
                raise CheckpointError(f"{self._where}: does not say how often {name} was updated")
            found[name] = int(value_of(self._counts[name], f"{name}.{STEP}"))
        return found

    def groups(self) -> list[Group]:
        """Parameters with their hyperparameters; without numbers, those with equal ones."""
        if self._weights_only:
            return []
        numbered = {match: item for key, item in self._groups.items()
                    if (match := _BY_NUMBER.fullmatch(key))}  # fmt: skip
        if numbered:
            return list(self._numbered(numbered))
        return list(self._by_name())

    def _take(self, key: str, item: Item) -> None:
        if key.startswith("param_groups."):
            self._groups[key.removeprefix("param_groups.")] = item
        elif key.startswith("state."):
            name, _, kind = key.removeprefix("state.").rpartition(".")
            if kind == STEP:
                self._counts[name] = item
            elif isinstance(item, StoredTensor):
                self.moments[name][kind] = item
            elif not self._weights_only:
                raise CheckpointError(f"{self._where}: {key} is no tensor")

    def _numbered(self, items: Mapping[re.Match[str], Item]) -> Iterator[Group]:
        found: dict[int, dict[str, Any]] = defaultdict(dict)
        for match, item in items.items():
            if match[2] in (*_USED, "params"):
                found[int(match[1])][match[2]] = value_of(item, match[0])
        for number in sorted(found):
            names = found[number].get("params")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise CheckpointError(f"{self._where}: group {number} does not name its parameters")
            yield Group(settings=settings(found[number]), parameters=names)

    def _by_name(self) -> Iterator[Group]:
        found: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for name in self.moments:
            keys = {setting: f"{name}.{setting}" for setting in _USED}
            own = settings(
                {s: value_of(self._groups[k], k) for s, k in keys.items() if k in self._groups}
            )
            found.setdefault(str(own), (own, []))[1].append(name)
        for own, names in found.values():
            yield Group(settings=own, parameters=names)
