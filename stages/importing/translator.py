"""Translators of accelerate's, DeepSpeed's and transformers' files, and the base of those whose
tool has one recipe."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from pipeline import UsageError
from pipeline.importing import ConfigFile, KeyOutcome, OtherTool, Request, Translation, Translator
from stages.importing import reader, untranslated
from stages.importing.engines import set_defaults
from stages.importing.reader import ACCELERATE_KIND, DEEPSPEED_KIND, TABLES, TRAINER_KIND
from stages.importing.recipe import compose
from stages.importing.report import Draft, Report
from stages.importing.rules import Table
from stages.importing.sources import script_data, several
from stages.importing.tools import TRANSLATED, advice_on, tool_of

Company: TypeAlias = Mapping[str, Any]
"""Keys without which another one means nothing, such as `use_peft` for `lora_r`."""
COMPANIES: Mapping[str, Sequence[Company]] = {
    TRAINER_KIND: (
        {},
        {"use_peft": True, "lora_target_modules": "all-linear"},
        {"eval_strategy": "steps"},
        {"dataset_name": "owner/name"},
        {"fsdp": "full_shard"},
    ),
    ACCELERATE_KIND: ({}, {"distributed_type": "FSDP"}, {"distributed_type": "DEEPSPEED"}),
    DEEPSPEED_KIND: ({}, {"zero_optimization": {"stage": 3}}),
}


class HuggingFace(Translator):
    """`accelerate config` files, DeepSpeed JSON and TrainingArguments, alone or together."""

    name = "hugging_face"
    signs = (
        "an accelerate config has `distributed_type` or `num_processes`, a DeepSpeed JSON "
        "`zero_optimization` or `train_batch_size`, and a file of transformers' TrainingArguments "
        "`output_dir` or `per_device_train_batch_size`"
    )

    def kind(self, content: Mapping[str, Any]) -> str | None:
        return reader.kind_of(content)

    def other_tool(self, content: Mapping[str, Any]) -> OtherTool | None:
        name = tool_of(content)
        if name is None or name in TRANSLATED:
            return None
        return OtherTool(name=name, advice=advice_on(name))

    def translate(self, files: Sequence[ConfigFile], request: Request) -> Translation:
        draft = Draft(files, request)
        _read_kinds(draft, files, TABLES, self.kind)
        return compose(draft, files[0].path.stem, script_data).translation()

    def advice(self, key: str, value: Any) -> str:
        return untranslated.advice(key, value)

    def meaning(self, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        found = None
        for kind, table in TABLES.items():

            def drafted(file: ConfigFile, kind: str = kind) -> Draft:
                draft = Draft([file])
                _read_kinds(draft, [file], [kind], lambda _: kind)
                return compose(draft, "recipe", script_data)

            one = meaning(key, content, table, COMPANIES[kind], drafted)
            if one is not None and one.to:
                return one
            found = found or one
        return untranslated.outcome(key, content[key]) or found


class RecipeTranslator(Translator):
    """The recipe of one tool, and the files that belong to it."""

    tool: ClassVar[str]
    table: ClassVar[Table] = {}
    """Its keys, except for lists of blocks."""
    companies: ClassVar[Sequence[Company]] = ({},)
    beside: ClassVar[Sequence[str]] = (ACCELERATE_KIND, DEEPSPEED_KIND)
    """Kinds of files that may be given too."""

    def kind(self, content: Mapping[str, Any]) -> str | None:
        if self.is_recipe(content):
            return f"{self.tool} recipe"
        found = reader.kind_of(content)
        return found if found in self.beside else None

    def is_recipe(self, content: Mapping[str, Any]) -> bool:
        """Return whether it is the tool's recipe."""
        return tool_of(content) == self.tool

    def supports(self, files: Sequence[ConfigFile]) -> bool:
        own = any(self.is_recipe(file.content) for file in files)
        return own and super().supports(files)

    def translate(self, files: Sequence[ConfigFile], request: Request) -> Translation:
        recipes = [file for file in files if self.is_recipe(file.content)]
        if len(recipes) > 1:
            both = f"{recipes[0].path} and {recipes[1].path}"
            raise UsageError(f"{both} are both recipes of {self.tool}", hint="import one by one")
        others = [file for file in files if file is not recipes[0]]
        draft = Draft(files, request)
        self.read(draft, recipes[0])
        draft.kinds.add(TRAINER_KIND)  # its defaults hold next to DeepSpeed's, as transformers'
        _read_kinds(draft, others, self.beside, self.kind)
        return self._composed(draft, recipes[0].path.stem).translation()

    def meaning(self, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        def drafted(file: ConfigFile) -> Draft:
            draft = Draft([file])
            self.read(draft, file)
            return self._composed(draft, "recipe")

        return meaning(key, content, self.table, self.companies, drafted)

    def _composed(self, draft: Draft, name: str) -> Draft:
        compose(draft, name, several)
        self.finish(draft)
        return draft

    @abstractmethod
    def read(self, report: Report, file: ConfigFile) -> None:
        """Read the tool's recipe, and of the other files those that only this tool has."""

    def finish(self, draft: Draft) -> None:
        """Add what shows in the draft alone."""


def _read_kinds(
    report: Report,
    files: Sequence[ConfigFile],
    kinds: Iterable[str],
    kind_of: Callable[[Mapping[str, Any]], str | None],
) -> None:
    """Read the files of these kinds, kind by kind, with DeepSpeed's defaults."""
    for kind in kinds:
        for file in files:
            if kind_of(file.content) == kind:
                reader.read(report, file, kind)
    if DEEPSPEED_KIND in report.kinds:
        set_defaults(report, alone=TRAINER_KIND not in report.kinds)


def meaning(
    key: str,
    content: Mapping[str, Any],
    table: Table,
    companies: Sequence[Company],
    drafted: Callable[[ConfigFile], Draft],
) -> KeyOutcome | None:
    """Return the outcome of a single key that the table, or a block in it, has; None if it has
    none. It is for a hint where somebody has written the key into a recipe.

    `drafted` reads a file. The key is read in each of the companies, next to the other keys of the
    content, until it has a place in the recipe; without them only where it contradicts one.
    """
    last: KeyOutcome | None = None
    others = {name: each for name, each in content.items() if name != key and name in table}
    for beside in (others, {}) if others else ({},):
        each = [_having(table, key, content[key], {**one, **beside}) for one in companies]
        for name, whole in itertools.chain.from_iterable(zip(*each, strict=True)):
            draft = drafted(ConfigFile(path=Path("config.yaml"), content=whole))
            found = next((one for one in draft.outcomes() if one.key == name), None)
            if found is not None and found.to:
                return found
            last = found or last
        if last is not None and last.outcome == "default":
            break
    return last


def _having(table: Table, key: str, value: Any, company: Company) -> Iterator[tuple[str, Company]]:
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
