"""Entry points of installed packages, and whose code an error comes from."""

from __future__ import annotations

import importlib.metadata
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

GROUP = "pipe.stages"
BUILT_IN = "pipetrain"
"""The distribution whose stages are built in."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry point: a name, and where its class is."""

    name: str
    value: str
    """`module:Class`."""
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def kind_of(name: str) -> str:
    """`wrap` of `wrap.fsdp`."""
    return name.partition(".")[0]


def installed_entries(group: str) -> Iterator[Entry]:
    """Entries that installed packages register in a group; nothing is imported."""
    known: dict[object, tuple[str, str]] = {}  # metadata is read whenever it is asked for
    for point in importlib.metadata.entry_points(group=group):
        dist = point.dist
        if dist not in known:
            known[dist] = (dist.name, dist.version) if dist else ("unknown", "")
        distribution, version = known[dist]
        yield Entry(name=point.name, value=point.value, distribution=distribution, version=version)


def line_in(error: BaseException, module: str) -> str:
    """`file:line` of the innermost code of a module, or of one next to it whose name begins alike;
    empty if the error comes from elsewhere."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    lines = [line for package, line, _ in _calls(error) if _belongs(package, module)]
    return lines[-1] if lines else ""


def culprit(error: BaseException) -> Entry | None:
    """The stage of an installed plugin whose code has failed, in itself or in a library that it
    called; None for an error in pipetrain."""
    plugin, found = _plugins(), None
    for package, *_ in _calls(error):
        found = None if package in ("pipeline", "stages") else plugin(package) or found
    return found


def line_in_plugin(error: BaseException) -> str:
    """`file:line in function` of the innermost code of an installed plugin; empty without any."""
    plugin = _plugins()
    lines = [f"{line} in {name}" for package, line, name in _calls(error) if plugin(package)]
    return lines[-1] if lines else ""


def _calls(error: BaseException) -> Iterator[tuple[str, str, str]]:
    """Package, `file:line` and function of each call that led to an error, the innermost last."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        yield module.partition(".")[0], f"{code.co_filename}:{line}", code.co_name


def _plugins() -> Callable[[str], Entry | None]:
    """A function that returns the stage of the installed plugin that a package belongs to."""
    plugins = [one for one in installed_entries(GROUP) if one.distribution != BUILT_IN]
    return lambda package: next((e for e in plugins if _belongs(package, e.value)), None)


def _belongs(package: str, module: str) -> bool:
    """Whether a package is a module's, or its name begins as that."""
    own = module.partition(":")[0].partition(".")[0]
    return package == own or package.startswith(f"{own}_")
