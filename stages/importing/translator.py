"""Translators of accelerate's, DeepSpeed's and transformers' files, and the base of those whose
tool has one recipe."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from pipeline import UsageError
from pipeline.importing import ConfigFile, KeyOutcome, OtherTool, Request, Translation, Translator
from stages.importing import hugging_face, rules
from stages.importing.draft import Draft
from stages.importing.hugging_face import ACCELERATE_KIND, DEEPSPEED_KIND, KINDS, TRAINER_KIND
from stages.importing.recipe import compose
from stages.importing.rules import TABLES, is_off
from stages.importing.sources import script_data, several

COMPONENT = "_component_"
"""Key of torchtune's blocks."""
TRANSLATED = ("axolotl", "LLaMA-Factory", "torchtune")
"""Tools that have a translator."""
STRATEGIES = {"ddp": "wrap.ddp", "fsdp": "wrap.fsdp", "deepspeed": "wrap.zero"}
"""Beginnings of names of strategies, as in Lightning's `deepspeed_stage_3`."""
INIT = "write a recipe with `pipe init`, for the model in the layout of Hugging Face"
Files: TypeAlias = Sequence[tuple[str | None, ConfigFile]]
"""Files, with the kind of each."""

rules.load("tools")
TOOLS = {
    name: ([{*sign.split("+")} for sign in signs.split()], advice.replace("INIT", INIT))
    for name, _, rest in (line.partition(": ") for line in dict(rules.lines("tools"))["signs ="])
    for signs, _, advice in [rest.partition(" -- ")]
}
"""Tool -> sets of keys, dotted in blocks; its files have all keys of one set; and what to do with a
file that is not translated."""


def tool_of(content: Mapping[str, Any]) -> str | None:
    """Return the tool whose file this is; None if no keys show it."""
    found = {*content}
    for key, block in content.items():
        found |= {f"{key}.{name}" for name in block} if isinstance(block, Mapping) else set()
    if any(name.endswith(f".{COMPONENT}") for name in found):
        return "torchtune"
    return next(
        (name for name, (signs, _) in TOOLS.items() if any(map(found.issuperset, signs))), None
    )


def kind_of(content: Mapping[str, Any]) -> str | None:
    """Return the kind that most keys belong to, of those that have a key to themselves; None for
    files of other tools."""
    if tool_of(content) is not None:
        return None
    known = {
        kind: [  # blocks where the table has blocks, values elsewhere
            key for key, value in content.items()
            if key in table and (isinstance(value, Mapping) != callable(table[key]) or not value)
        ]
        for kind, table in ((kind, TABLES[name]) for kind, name in KINDS.items())
    }  # fmt: skip
    shared = Counter(chain.from_iterable(known.values()))
    telling = {key for key, value in content.items() if shared[key] == 1
               and (key not in TABLES["common"] or isinstance(value, Mapping))}  # fmt: skip
    own = [kind for kind, keys in known.items() if not telling.isdisjoint(keys)]
    best = max(own, key=lambda kind: len(known[kind]), default=None)
    others = sum(key.startswith((*TABLES["beginnings"],)) for key in content)
    return best if best and 2 * (len(known[best]) + others) >= len(content) else None


class TableTranslator(Translator):
    """A translator whose files have tables."""

    tables: ClassVar[Mapping[str, str]]
    """Kind of file that a recipe may have keys of -> name of its table, but for lists of blocks."""

    @abstractmethod
    def draft(self, files: Files, request: Request) -> Draft:
        """Return the draft of a recipe that the files make."""

    def translate(self, files: Sequence[ConfigFile], request: Request) -> Translation:
        kinds = [(self.kind(file.content), file) for file in files]
        return self.draft(kinds, request).translation()

    def meaning(self, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        found = [self._meaning(kind, key, content) for kind in self.tables]
        known = [one for one in found if one is not None]
        return next((one for one in known if one.to), known[0] if known else None)

    def _meaning(self, kind: str, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        """Return the outcome of the key in a file of this kind, which it may have in a block.

        It is read in each of the companies, next to the other keys of the content, until it has a
        place in the recipe; without them only where it contradicts one.
        """
        table, last = TABLES[self.tables[kind]], None
        companies = json.loads(TABLES["companies"][self.tables[kind]])
        others = {name: each for name, each in content.items() if name != key and name in table}
        for more in (others, {}) if others else ({},):
            each = [_having(table, key, content[key], {**one, **more}) for one in companies]
            for name, whole in chain.from_iterable(zip(*each, strict=True)):
                file = ConfigFile(path=Path("config.yaml"), content=whole)
                outcomes = self.draft([(kind, file)], Request()).outcomes()
                found = next((one for one in outcomes if one.key == name), None)
                if found is not None and found.to:
                    return found
                last = found or last
            if last is not None and last.outcome == "default":
                break
        return last


class HuggingFace(TableTranslator):
    """`accelerate config` files, DeepSpeed JSON and TrainingArguments, separately or together."""

    name = "hugging_face"
    signs = (
        "an accelerate config has `distributed_type` or `num_processes`, a DeepSpeed JSON "
        "`zero_optimization` or `train_batch_size`, and a file of transformers' TrainingArguments "
        "`output_dir` or `per_device_train_batch_size`"
    )
    tables = KINDS

    def kind(self, content: Mapping[str, Any]) -> str | None:
        return kind_of(content)

    def other_tool(self, content: Mapping[str, Any]) -> OtherTool | None:
        tool = tool_of(content)
        if tool is None or tool in TRANSLATED:
            return None
        return OtherTool(name=tool, advice=TOOLS[tool][1])

    def draft(self, files: Files, request: Request) -> Draft:
        draft = Draft([file for _, file in files], request)
        hugging_face.read_all(draft, files)
        return compose(draft, files[0][1].path.stem, script_data)

    def advice(self, key: str, value: Any) -> str:
        pair, own = f"{key}:{'no' if value is False else value}", TABLES["advice"]
        always = TABLES["always"]
        found: str = own.get(pair) or always.get(pair) or always.get(key) or own.get(key, "")
        if found and is_off(value) and found is own.get(key):
            found = "leave it out: {value} is the default"
        shown = "..." if isinstance(value, Mapping | list) else value
        return found.format(value=shown if isinstance(shown, str) else json.dumps(value))

    def meaning(self, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        found, to, value = super().meaning(key, content), TABLES["keys"].get(key), content[key]
        if (found and found.to) or to is None:
            return found
        stages = (use for name, use in STRATEGIES.items() if str(value).startswith(name))
        meant = {
            "wrap.use": next(stages, None),
            "adapter.use": "adapter.lora" if value else None,
            "adapter.quantize": "nf4" if value else None,
            "data.loss": "completion" if value else "all",
        }
        return KeyOutcome(outcome="translated", to={to: meant.get(to, value)})


class RecipeTranslator(TableTranslator):
    """The recipe of one tool, and the files that belong to it."""

    tool: ClassVar[str]
    """Name of the tool, whose recipes are of the kind `TOOL recipe`."""
    companions: ClassVar[Sequence[str]] = (ACCELERATE_KIND, DEEPSPEED_KIND)
    """Kinds of files that may be given too."""

    table: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        cls.tables, cls.table = {f"{cls.tool} recipe": cls.name}, TABLES[cls.name]

    def kind(self, content: Mapping[str, Any]) -> str | None:
        if tool_of(content) == self.tool:
            return f"{self.tool} recipe"
        found = kind_of(content)
        return found if found in self.companions else None

    def supports(self, files: Sequence[ConfigFile]) -> bool:
        kinds = [self.kind(file.content) for file in files]
        return all(kinds) and f"{self.tool} recipe" in kinds

    def draft(self, files: Files, request: Request) -> Draft:
        recipe, *more = [file for kind, file in files if kind in self.tables]
        if more:
            both = f"{recipe.path} and {more[0].path}"
            raise UsageError(f"{both} are both recipes of {self.tool}", hint="import one by one")
        draft = Draft([file for _, file in files], request)
        self.read(draft, recipe)
        draft.kinds.add(TRAINER_KIND)  # its defaults hold next to DeepSpeed's, as transformers'
        hugging_face.read_all(draft, files)
        compose(draft, recipe.path.stem, several)
        self.finish(draft)
        return draft

    @abstractmethod
    def read(self, draft: Draft, file: ConfigFile) -> None:
        """Read the tool's recipe, and of the other files those that only this tool has."""

    def finish(self, draft: Draft) -> None:
        """Add what shows in the finished draft only."""


def _having(
    table: Mapping[str, Any], key: str, value: Any, company: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the dotted name of a key for every place where the table has it, and the company with
    the key there."""
    if key in table:
        yield key, {**company, key: value}
    for block, inner in table.items():
        if isinstance(inner, Mapping):
            given = company.get(block)
            within = given if isinstance(given, Mapping) else {}
            for name, content in _having(inner, key, value, within):
                yield f"{block}.{name}", {**company, block: content}
