"""Installed stages: listed from package metadata without importing any, loaded one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.contracts.signature import gives, init_fields, name_of, needs
from pipeline.errors import PluginError
from pipeline.utils.text import closest

GROUP = "pipe.stages"
BUILT_IN = "pipetrain"
"""The distribution whose stages are built in."""
_ALSO = ("resource_needs", "run_dry")
"""Methods that take artifacts as `run` does, of the stages that have them."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry point: a stage's name and where its class is."""

    name: str
    value: str
    """`module:Class`."""
    distribution: str
    version: str

    @property
    def kind(self) -> str:
        """The part before the dot: `wrap`."""
        return kind_of(self.name)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def kind_of(name: str) -> str:
    """`wrap` of `wrap.fsdp`."""
    return name.partition(".")[0]


def installed_entries(group: str) -> Iterator[Entry]:
    """Entries that installed packages register in a group; nothing is imported."""
    known: dict[object, tuple[str, str]] = {}  # metadata is read anew whenever it is asked for
    for point in importlib.metadata.entry_points(group=group):
        dist = point.dist
        if dist not in known:
            known[dist] = (dist.name, dist.version) if dist else ("unknown", "")
        distribution, version = known[dist]
        yield Entry(name=point.name, value=point.value, distribution=distribution, version=version)


class Registry:
    """Stages by name."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[str, list[Entry]] = {}
        for entry in sorted(entries, key=lambda entry: (entry.name, entry.distribution)):
            same_name = self._entries.setdefault(entry.name, [])
            # an editable install beside a normal one lists its entry points twice
            if all(other.distribution != entry.distribution for other in same_name):
                same_name.append(entry)
        self._loaded: dict[str, type] = {}

    @classmethod
    def installed(cls) -> Registry:
        """Stages that the installed packages register under `pipe.stages`."""
        return cls(installed_entries(GROUP))

    def entries(self) -> list[Entry]:
        """All of them by name; two packages' stages of one name are both there."""
        return [entry for same_name in self._entries.values() for entry in same_name]

    def names(self, kind: str = "") -> list[str]:
        """Every stage's name, or those of one kind."""
        return [name for name in self._entries if not kind or kind_of(name) == kind]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """The one entry of `name`, which is registered. Raises PluginError when packages clash."""
        entries = self._entries[name]
        if len(entries) > 1:
            owners = " and ".join(str(entry) for entry in entries)
            raise PluginError(
                f"stage `{name}` is registered by {owners}", hint="uninstall one of them"
            )
        return entries[0]

    def load(self, name: str) -> type:
        """The stage class. Raises PluginError naming the package that is at fault."""
        if name not in self._loaded:
            self._loaded[name] = _load(self.entry(name))
        return self._loaded[name]

    def giving(self, kind: type, *inputs: type) -> str:
        """The stage that gives a `kind` and requires no artifacts but `inputs`; a built-in stage
        comes before others. Raises PluginError when there is none."""
        for entry in sorted(self.entries(), key=lambda entry: entry.distribution != BUILT_IN):
            with contextlib.suppress(PluginError):
                stage = self.load(entry.name)
                required = {need.type for need in needs(stage) if not need.optional}
                if issubclass(gives(stage) or object, kind) and required <= {*inputs}:
                    return entry.name
        raise PluginError(f"no installed stage gives {kind.__name__} without further slots")

    def hint(self, name: str) -> str:
        """Words for somebody who asked for a stage that is not there."""
        same_kind = self.names(kind_of(name))
        without_kind = [other for other in self._entries if other.partition(".")[2] == name]
        found = closest(name, same_kind) or closest(name, self._entries)
        found = found or next(iter(without_kind), None)
        parts = [f"did you mean `{found}`?"] if found else []
        if same_kind:
            parts.append(f"{kind_of(name)} stages: {', '.join(same_kind)}")
        return " ".join(parts) or "`pipe stages` lists what is installed"


def load_entry(entry: Entry, group: str, what: str) -> Any:
    """The object of an entry point, which is called `what`. Raises PluginError naming the package
    that is at fault."""
    point = importlib.metadata.EntryPoint(entry.name, entry.value, group)
    try:
        return point.load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise PluginError(
            f"{what} `{entry.name}` of {entry} cannot be loaded: {reason}",
            hint=f"repair or uninstall {entry.distribution}",
        ) from error


def _load(entry: Entry) -> type:
    stage = load_entry(entry, GROUP, "stage")
    fault = _fault(stage)
    if fault:
        raise PluginError(f"stage `{entry.name}` of {entry} ({entry.value}) {fault}")
    for method in ("run", *(name for name in _ALSO if hasattr(stage, name))):
        needs(stage, method)
    gives(stage)
    return stage  # type: ignore[no-any-return]


def _fault(stage: object) -> str:
    """The first thing that a class lacks to be a stage; empty when it is one."""
    if not isinstance(stage, type) or not dataclasses.is_dataclass(stage):
        return "is not a dataclass"
    if not stage.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "is not a frozen dataclass"
    if not all(field.kw_only for field in init_fields(stage)):
        return "is not a keyword-only dataclass (kw_only=True)"
    if not stage.__doc__ or stage.__doc__.startswith(f"{stage.__name__}("):
        return "has no docstring"
    if "use" in stage.__dataclass_fields__:
        return "has a field called `use`, which a recipe cannot set"
    if not callable(getattr(stage, "run", None)):
        return f"has no method `run` ({name_of(stage)})"
    return ""
