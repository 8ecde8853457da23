"""Files of other tools, the contract of their translators, and keys of such tools in a recipe."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipeline.chain.elsewhere import Meant, Slots, shortened
from pipeline.chain.plan import plan_file
from pipeline.chain.registry import Plugins
from pipeline.errors import Location, PipeError, RecipeError, UsageError
from pipeline.recipe.nodes import KeyPath, UnknownKey, plain
from pipeline.recipe.parse import parse
from pipeline.utils.foreign import read_whole

Outcome = Literal["translated", "default", "not translated", "refused"]
"""translated: the recipe holds the setting. default: it needs no place in the recipe.
not translated: recipes have no place for it. refused: without it, the training would differ."""


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A configuration file and its content."""

    path: Path
    content: Mapping[str, Any]


def read_config(path: Path) -> ConfigFile:
    """Return the plain values of a YAML or JSON file. Raises UsageError, and RecipeError."""
    if path.suffix in (".py", ".sh", ".ipynb"):
        form = "write its arguments as YAML, one a line as in `learning_rate: 2.0e-5`"
        message = f"{path} is a script, not a file of settings"
        raise UsageError(message, hint=f"{form}, and import that")

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > len(dict(pairs)):
            key = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise UsageError(f"{path}: `{key}` is given twice")
        return dict(pairs)

    try:
        text = read_whole(path).decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=unique) if path.suffix == ".json" else None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if path.suffix != ".json":
        root, problems = parse(
            text,
            locate=lambda line, column: Location(file=str(path), line=line + 1, column=column + 1),
            folder=Path.cwd(),  # as in the tools that read these files
        )
        if problems:
            raise RecipeError(problems)
        value = None if root is None else plain(root)
    if not isinstance(value, dict):
        raise UsageError(f"{path}: does not map keys to values")
    return ConfigFile(path=path, content=value)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The user's options, which supplement the files."""

    model: str | None = None
    data: Sequence[str] = ()
    procs: int | None = None


@dataclass(kw_only=True)
class KeyOutcome:
    """The outcome of one key of one file."""

    file: str = ""
    key: str = ""
    """Dotted, with the keys of the blocks around it."""
    value: Any = None
    outcome: Outcome
    to: dict[str, Any] = field(default_factory=dict)
    """Recipe key -> value that follows from this key."""
    why: str = ""
    hint: str = ""
    blocks: bool = False
    """Whether no recipe is written because of it."""

    @property
    def left_out(self) -> bool:
        """Whether the recipe lacks the setting."""
        return self.outcome in ("not translated", "refused")


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A recipe, and the outcome of every key that it was made from."""

    recipe: Mapping[str, Any] | None
    """None if an outcome blocks it."""
    notes: Mapping[KeyPath, str]
    """Path of a value in the recipe -> comment after it."""
    missing: Mapping[str, str]
    """Recipe keys that the user has to fill in -> description of the value."""
    outcomes: Sequence[KeyOutcome]
    """One for every key of every file, in their order."""


@dataclass(frozen=True, kw_only=True)
class OtherTool:
    """A tool whose files are recognised, and not translated."""

    name: str
    advice: str
    """A hint for its files; may be empty."""


class Translator(ABC):
    """Translator of the configuration files of one family of tools, which together describe one
    training. Nothing in a file is ever executed or unpickled."""

    name: ClassVar[str]
    signs: ClassVar[str] = ""
    """Keys by which people recognise its files, for the message about a file of no known kind."""

    @abstractmethod
    def kind(self, content: Mapping[str, Any]) -> str | None:
        """Return the kind of file that has these keys, in words; None if it is not supported."""

    def supports(self, files: Sequence[ConfigFile]) -> bool:
        """Return whether these files together are for this translator."""
        return all(self.kind(file.content) for file in files)

    def other_tool(self, content: Mapping[str, Any]) -> OtherTool | None:
        """Return the unsupported tool whose file this is, if the keys show it."""
        return None

    def meaning(self, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        """Return the outcome of one key that stands in a recipe, where it has no meaning; None if
        no file of these tools has it. `content` has its value, and all such keys of the recipe."""
        return None

    def advice(self, key: str, value: Any) -> str:
        """Return what to do about such a key if its outcome does not say it, else nothing."""
        return ""

    @abstractmethod
    def translate(self, files: Sequence[ConfigFile], request: Request) -> Translation:
        """Return the recipe of all files together. Raises UsageError if they do not agree."""


class Translators(Plugins[type[Translator]]):
    """Translator classes by name."""

    group, noun, base = "pipe.imports", "translator", Translator


def installed_translators() -> list[Translator]:
    """Return the installed packages' translators. Raises PluginError if one cannot be loaded."""
    found = Translators.installed()
    return [found.load(name)() for name in found.names()]


def choose(files: Sequence[ConfigFile], translators: Sequence[Translator]) -> Translator:
    """Return the translator that supports all the files. Raises UsageError if none does."""
    for translator in translators:
        if translator.supports(files):
            return translator
    signs = "; ".join(translator.signs for translator in translators)
    for file in files:
        if not any(translator.kind(file.content) for translator in translators):
            tools = (translator.other_tool(file.content) for translator in translators)
            if tool := next(filter(None, tools), None):
                belongs = f"is a file of {tool.name}, which cannot be imported"
                raise UsageError(f"{file.path}: {belongs}", hint=tool.advice or signs)
            unknown = "its keys do not show which kind of configuration it is"
            raise UsageError(f"{file.path}: {unknown}", hint=signs)
    raise UsageError("these files belong to different tools", hint="import them one by one")


def of_other_tools(unknown: Sequence[UnknownKey], slots: Slots) -> list[Meant]:
    """Return what each of a recipe's unknown keys means in other tools, which read all of them as
    one file. No hint for a key that no tool has, or that only a whole file explains."""
    installed, names, found = Translators.installed(), [], []
    for each in unknown:  # in the slot of adapter.lora, `r` is `lora_r`
        stage = slots.uses.get(each.slot, "").partition(".")[2]
        called = (each.name, each.name.replace("-", "_"), f"{stage}_{each.name}")
        names.append([*dict.fromkeys(called)])
    pairs = [*zip(unknown, names, strict=True)]
    content = {name: each.value for each, own in pairs for name in own}
    for each, own in pairs:
        advice, outcomes = "", []
        for name, entry in itertools.product(own, installed.names()):
            with contextlib.suppress(PipeError):  # it is the recipe that is at fault
                translator = installed.load(entry)()
                advice = advice or translator.advice(name, each.value)
                outcomes.append(translator.meaning(name, {**content, name: each.value}))
        known = [outcome for outcome in outcomes if outcome is not None]
        to = next((outcome.to for outcome in known if outcome.to), {})
        hint = advice or ("" if to else _reason(each, known))
        found.append(Meant(hint=hint, to=to, sure=bool(advice)))
    return found


def _reason(unknown: UnknownKey, outcomes: Sequence[KeyOutcome]) -> str:
    """Return the hint for a key that no field of a recipe stands for."""
    for outcome in outcomes:
        if outcome.outcome == "default":
            verb = outcome.why.split(" ")[0] in ("is", "has", "changes", "follows")
            why = f"{'it ' if verb else ''}{outcome.why}"
            if unknown.value is None or unknown.value is False:
                why = f"{shortened(unknown.value)} is the default"
            return f"leave it out: {why}"
        if outcome.outcome == "not translated":
            return ": ".join(part for part in (outcome.why, outcome.hint) if part)
    # why a value is refused is about a file of the tool; what to do instead is about the recipe
    return next((one.hint for one in outcomes if one.hint), "")


plan_recipe = functools.partial(plan_file, foreign=of_other_tools)
"""As `plan_file`, of a recipe that a person wrote: hints know the keys of other tools."""
