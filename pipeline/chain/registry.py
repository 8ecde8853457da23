"""Installed plugins: listed from package metadata without importing any, loaded one by one; and
whose code an error comes from."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.metadata
import inspect
import itertools
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args, get_origin

from pipeline.contracts.export import VERIFY, ExportedModel, OpensText, VerifiesExport
from pipeline.contracts.signature import field_types, gives, init_fields, name_of, needs
from pipeline.contracts.stage import TAKES_ARTIFACTS, TAKES_NONE, TAKES_ONE
from pipeline.errors import PluginError
from pipeline.recipe.nodes import RESERVED, TAKES
from pipeline.utils.text import closest

GROUP = "pipe.stages"
BUILT_IN = "pipetrain"
"""The distribution whose stages are built in."""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
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


class Plugins(Generic[T]):
    """Objects that packages register in one entry-point group, loaded when asked for."""

    group: ClassVar[str]
    noun: ClassVar[str]
    """The kind of object in messages, as in `stage`."""
    base: ClassVar[type | None] = None
    """The class that all objects derive from, if they are classes."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[str, list[Entry]] = {}
        for entry in sorted(entries, key=lambda entry: (entry.name, entry.distribution)):
            same_name = self._entries.setdefault(entry.name, [])
            # an editable install next to a normal one lists its entry points twice
            if all(other.distribution != entry.distribution for other in same_name):
                same_name.append(entry)
        self._loaded: dict[str, T] = {}

    @classmethod
    def installed(cls) -> Self:
        """Objects that the installed packages register in the group."""
        return cls(installed_entries(cls.group))

    def entries(self) -> list[Entry]:
        """Every entry in the order of names, several of one name included."""
        return [entry for same_name in self._entries.values() for entry in same_name]

    def names(self, kind: str = "") -> list[str]:
        """Every name, or only names of one kind (`wrap`), in alphabetical order."""
        return [name for name in self._entries if not kind or kind_of(name) == kind]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """The one entry of `name`, which is registered. Raises PluginError when packages clash."""
        entries = self._entries[name]
        if len(entries) > 1:
            owners = " and ".join(map(str, entries))
            message = f"{self.noun} `{name}` is registered by {owners}"
            raise PluginError(message, hint="uninstall one of them")
        return entries[0]

    def load(self, name: str) -> T:
        """The object called `name`. Raises PluginError naming the package that is at fault."""
        if name in self._loaded:
            return self._loaded[name]
        entry = self.entry(name)
        try:
            loaded = importlib.metadata.EntryPoint(name, entry.value, self.group).load()
        except Exception as error:
            line = line_in(error, entry.value)
            reason = f"{type(error).__name__}: {error}" + (f", at {line}" if line else "")
            hint = f"repair or uninstall {entry.distribution}"
            if isinstance(error, TypeError) and str(error).startswith("non-default argument"):
                hint = "write `@dataclass(frozen=True, kw_only=True)`"
            message = f"{self.noun} `{name}` of {entry} cannot be loaded: {reason}"
            raise PluginError(message, hint=hint) from error
        if fault := self.fault(loaded):
            raise PluginError(f"{self.noun} `{name}` of {entry} ({entry.value}) {fault}")
        self._loaded[name] = loaded
        return self._loaded[name]

    def find(self, name: str) -> T | None:
        """The object called `name`; None where it is not registered or cannot be loaded."""
        with contextlib.suppress(PluginError):
            return self.load(name) if name in self else None
        return None

    def fault(self, loaded: Any) -> str:
        """The first thing that a loaded object lacks; empty when it is sound."""
        if self.base is None or (isinstance(loaded, type) and issubclass(loaded, self.base)):
            return ""
        return f"is not a {self.base.__name__}"


class Registry(Plugins[type]):
    """Stage classes by name."""

    group = GROUP
    noun = "stage"

    def fault(self, loaded: Any) -> str:
        """The first thing that a class lacks to be a stage. Raises PluginError for annotations that
        cannot be read."""
        if not isinstance(loaded, type) or not dataclasses.is_dataclass(loaded):
            return "is not a dataclass"
        if not loaded.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return "is not a frozen dataclass"
        if not all(field.kw_only for field in init_fields(loaded)):
            return "is not a keyword-only dataclass (kw_only=True)"
        if not loaded.__doc__ or loaded.__doc__.startswith(f"{loaded.__name__}("):
            return "has no docstring"
        for name in RESERVED:
            if name in loaded.__dataclass_fields__:
                return f"has a field called `{name}`, which a recipe cannot set"
        if not callable(getattr(loaded, "run", None)):
            return f"has no method `run` ({name_of(loaded)})"
        return _wrong_hook(loaded)

    def giving(self, kind: type, *inputs: type) -> str:
        """The stage that returns a `kind` and requires no artifacts but `inputs`; a built-in stage
        comes before others. Raises PluginError when there is none."""
        for entry in sorted(self.entries(), key=lambda entry: entry.distribution != BUILT_IN):
            stage = self.find(entry.name)
            if stage is None or not issubclass(gives(stage) or object, kind):
                continue
            if {need.type for need in needs(stage) if not need.optional} <= {*inputs}:
                return entry.name
        raise PluginError(f"no installed stage returns {kind.__name__} without further slots")

    def fields(self, name: str) -> dict[str, Any]:
        """The types of a stage's fields; empty for one that is not known or cannot be loaded."""
        with contextlib.suppress(PluginError):
            return dict(field_types(self.load(name))) if name in self else {}
        return {}

    def common_fields(self, first: str, second: str) -> Collection[str]:
        """Fields of two stages of the same name, type and bounds, and `takes`, if they take the
        same; none where a stage is not known or cannot be loaded."""
        one, other = self.find(first), self.find(second)
        if one is None or other is None:
            return ()
        types = self.fields(second)
        same = [name for name, kind in self.fields(first).items() if types.get(name) == kind]
        return [*same, TAKES] if needs(one) == needs(other) else same

    def hint(self, name: str) -> str:
        """Hint for a recipe that names a stage that is not installed."""
        same_kind = self.names(kind_of(name))
        found = self._closest_stage(name, same_kind or self.names())
        numbers, with_it = map(int, re.findall(r"\d+$", name)), ""  # as in `wrap.zero3`
        for number, (field, kind) in itertools.product(numbers, self.fields(found or "").items()):
            if get_origin(kind) is Literal and number in get_args(kind):
                with_it = f" with `{field}: {number}`"
                break
        parts = [f"did you mean `{found}`{with_it}?"] if found else []
        if same_kind:
            parts.append(f"{kind_of(name)} stages: {', '.join(same_kind)}")
        shown = " ".join(parts) or "`pipe stages` lists what is installed"
        return f"{shown}; or install its package into this environment"

    def _closest_stage(self, name: str, options: list[str]) -> str | None:
        """The stage of a name without its kind (`fsdp`), the one closest by letters, or one whose
        docstring has the name (`wrap.deepspeed`)."""
        word = name.rpartition(".")[2]
        tails = {option.partition(".")[2]: option for option in options}
        likely = difflib.get_close_matches(name, options, n=1, cutoff=0.8)
        if found := tails.get(word) or next(iter(likely), None):
            return found
        for option in options:
            summary = (getattr(self.find(option), "__doc__", None) or "").partition("\n")[0]
            if word.lower() in re.findall(r"\w+", summary.lower()):
                return option
        return tails.get(closest(word, tails) or "") or closest(name, options)


def _wrong_hook(stage: type) -> str:
    """The first optional method that cannot be called as its protocol says."""
    for method in ("run", *(name for name in TAKES_ARTIFACTS if hasattr(stage, name))):
        needs(stage, method)
    gives(stage)
    for names, says, *arguments in ((TAKES_ONE, "does not take one argument", "argument"),
                                    (TAKES_NONE, "takes arguments")):  # fmt: skip
        for name in names:
            if hasattr(stage, name) and not _takes(getattr(stage, name), "self", *arguments):
                return f"has a `{name}` that {says} ({name_of(stage)})"
    if issubclass(stage, OpensText):
        for name in ("open_folder", "open_trained", "open_source"):
            if not _takes(getattr(stage, name), like=getattr(OpensText, name)):
                return f"has a `{name}` that does not take what OpensText says ({name_of(stage)})"
    verify = getattr(stage, "verify", None)
    exports = verify is not None and issubclass(gives(stage) or object, ExportedModel)
    if exports and not _takes(verify, like=VerifiesExport.verify):
        return f"has a `verify` that `pipe verify` cannot call: write `{VERIFY}`"
    return ""


def _takes(method: Any, *arguments: object, like: Any = None) -> bool:
    """Whether a method takes these arguments, and all that a protocol's method takes."""
    wanted = {} if like is None else {**inspect.signature(like).parameters}
    named = {name for name, one in wanted.items() if one.kind is one.KEYWORD_ONLY}
    given = [*arguments, *(wanted.keys() - named)]
    try:
        inspect.signature(method).bind(*given, **dict.fromkeys(named))
    except (TypeError, ValueError):
        return False
    return True


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
