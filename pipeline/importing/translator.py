"""What a translator of another tool's configuration is, and which are installed."""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipeline.errors import PluginError, UsageError
from pipeline.plan.registry import installed_entries
from pipeline.recipe.nodes import KeyPath

GROUP = "pipe.imports"

Outcome = Literal["translated", "default", "refused"]
"""translated: the recipe says it. default: it is so without being said, or means nothing here.
refused: the recipe does not do it."""


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """One file: where it is and what it says."""

    path: Path
    content: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the person says of what the files may not know."""

    model: str | None = None
    data: Sequence[str] = ()
    procs: int | None = None


@dataclass(frozen=True, kw_only=True)
class KeyOutcome:
    """What became of one key of one file."""

    file: str
    key: str
    """With those of the blocks around it, joined by dots."""
    value: Any
    outcome: Outcome
    to: Mapping[str, Any] = field(default_factory=dict)
    """Recipe key -> the value that it got."""
    why: str = ""
    hint: str = ""
    """What to do about it."""
    blocks: bool = False
    """Whether there is no recipe that does without it."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A recipe, and the account of how it came about."""

    recipe: Mapping[str, Any] | None
    """None if a key was refused that no recipe does without."""
    notes: Mapping[KeyPath, str]
    """Path of a value in the recipe -> comment behind it."""
    missing: Mapping[str, str]
    """Recipe keys that the person has to fill in -> what belongs there."""
    fates: Sequence[KeyOutcome]
    """One for every key of every file, in their order."""


class Translator(ABC):
    """Knows the configuration files of one family of tools, which together say one training.
    Nothing in a file is ever executed or unpickled."""

    name: ClassVar[str]

    @abstractmethod
    def kind(self, content: Mapping[str, Any]) -> str | None:
        """What kind of file has such keys, for people; None if this translator knows it not."""

    def foreign(self, content: Mapping[str, Any]) -> str | None:
        """Whose file it is, for one that is known to be none of this translator's."""
        return None

    @abstractmethod
    def translate(self, files: Sequence[ConfigFile], request: Request) -> Translation:
        """The recipe of all files together. Raises UsageError for files that do not belong
        together."""


def installed_translators() -> list[Translator]:
    """What the installed packages register. Raises PluginError for one that cannot be loaded."""
    return [_load(entry.name, entry.value, str(entry)) for entry in installed_entries(GROUP)]


def choose(files: Sequence[ConfigFile], translators: Sequence[Translator]) -> Translator:
    """The translator that knows all the files. Raises UsageError when there is none."""
    for translator in translators:
        if all(translator.kind(file.content) for file in files):
            return translator
    for file in files:
        if not any(translator.kind(file.content) for translator in translators):
            told = (translator.foreign(file.content) for translator in translators)
            tool = next((name for name in told if name is not None), None)
            known = f"is a file of {tool}, which cannot be imported"
            unknown = "its keys are those of no configuration that can be imported"
            raise UsageError(
                f"{file.path}: {known if tool else unknown}",
                hint="an accelerate config, a DeepSpeed JSON, or transformers' TrainingArguments",
            )
    raise UsageError("these files belong to different tools", hint="import them one by one")


def _load(name: str, value: str, owner: str) -> Translator:
    try:
        kind = importlib.metadata.EntryPoint(name, value, GROUP).load()
    except Exception as error:
        raise PluginError(
            f"translator `{name}` of {owner} cannot be loaded: {type(error).__name__}: {error}",
            hint="repair or uninstall that package",
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Translator)):
        raise PluginError(f"translator `{name}` of {owner} ({value}) is no Translator")
    return kind()
