"""Translators of accelerate's, DeepSpeed's and transformers' files, and the base of those whose
tool has one recipe."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from pipeline import UsageError
from pipeline.importing import ConfigFile, KeyOutcome, OtherTool, Request, Translation, Translator
from stages.importing import reader, tools
from stages.importing.draft import Draft
from stages.importing.engines import set_defaults
from stages.importing.reader import ACCELERATE_KIND, DEEPSPEED_KIND, TABLES, TRAINER_KIND
from stages.importing.recipe import compose
from stages.importing.rules import Table
from stages.importing.sources import script_data, several
from stages.importing.tools import TRANSLATED, advice_on, tool_of

Company: TypeAlias = Mapping[str, Any]
"""Keys without which another one means nothing, such as `use_peft` for `lora_r`."""
COMPANIES: Mapping[str, Sequence[Company]] = {
    TRAINER_KIND: (
        {}, {"use_peft": True, "lora_target_modules": "all-linear"}, {"eval_strategy": "steps"},
        {"dataset_name": "owner/name"}, {"fsdp": "full_shard"},
    ),
    ACCELERATE_KIND: ({}, {"distributed_type": "FSDP"}, {"distributed_type": "DEEPSPEED"}),
    DEEPSPEED_KIND: ({}, {"zero_optimization": {"stage": 3}}),
}  # fmt: skip
Files: TypeAlias = Sequence[tuple[str | None, ConfigFile]]
"""Files, with the kind of each."""


class TableTranslator(Translator):
    """A translator whose files have tables."""

    @abstractmethod
    def tables(self) -> Mapping[str, tuple[Table, Sequence[Company]]]:
        """Return, for each kind of file that a recipe may have keys of, the table, except for lists
        of blocks, and the companies of keys."""

    @abstractmethod
    def draft(self, files: Files, request: Request) -> Draft:
        """Return the draft of a recipe that the files make."""

    def translate(self, files: Sequence[ConfigFile], request: Request) -> Translation:
        kinds = [(self.kind(file.content), file) for file in files]
        return self.draft(kinds, request).translation()

    def meaning(self, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        found = None
        for kind in self.tables():
            one = self._meaning(kind, key, content)
            if one is not None and one.to:
                return one
            found = found or one
        return found

    def _meaning(self, kind: str, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        """Return the outcome of the key in a file of this kind, which it may have in a block.

        It is read in each of the companies, next to the other keys of the content, until it has a
        place in the recipe; without them only where it contradicts one.
        """
        table, companies = self.tables()[kind]
        last: KeyOutcome | None = None
        others = {name: each for name, each in content.items() if name != key and name in table}
        for beside in (others, {}) if others else ({},):
            each = [_having(table, key, content[key], {**one, **beside}) for one in companies]
            for name, whole in itertools.chain.from_iterable(zip(*each, strict=True)):
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

    def tables(self) -> Mapping[str, tuple[Table, Sequence[Company]]]:
        return {kind: (TABLES[kind], companies) for kind, companies in COMPANIES.items()}

    def draft(self, files: Files, request: Request) -> Draft:
        draft = Draft([file for _, file in files], request)
        _read_kinds(draft, files)
        return compose(draft, files[0][1].path.stem, script_data)

    def advice(self, key: str, value: Any) -> str:
        return tools.advice(key, value)

    def meaning(self, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        found = super().meaning(key, content)
        return found if found and found.to else tools.outcome(key, content[key]) or found


class RecipeTranslator(TableTranslator):
    """The recipe of one tool, and the files that belong to it."""

    tool: ClassVar[str]
    table: ClassVar[Table] = {}
    """Its keys, except for lists of blocks."""
    companies: ClassVar[Sequence[Company]] = ({},)
    beside: ClassVar[Sequence[str]] = (ACCELERATE_KIND, DEEPSPEED_KIND)
    """Kinds of files that may be given too."""

    def kind(self, content: Mapping[str, Any]) -> str | None:
        if tool_of(content) == self.tool:
            return f"{self.tool} recipe"
        found = reader.kind_of(content)
        return found if found in self.beside else None

    def supports(self, files: Sequence[ConfigFile]) -> bool:
        own = any(tool_of(file.content) == self.tool for file in files)
        return own and super().supports(files)

    def tables(self) -> Mapping[str, tuple[Table, Sequence[Company]]]:
        return {f"{self.tool} recipe": (self.table, self.companies)}

    def draft(self, files: Files, request: Request) -> Draft:
        recipe, *more = [file for kind, file in files if kind == f"{self.tool} recipe"]
        if more:
            both = f"{recipe.path} and {more[0].path}"
            raise UsageError(f"{both} are both recipes of {self.tool}", hint="import one by one")
        draft = Draft([file for _, file in files], request)
        self.read(draft, recipe)
        draft.kinds.add(TRAINER_KIND)  # its defaults hold next to DeepSpeed's, as transformers'
        _read_kinds(draft, files)
        compose(draft, recipe.path.stem, several)
        self.finish(draft)
        return draft

    @abstractmethod
    def read(self, draft: Draft, file: ConfigFile) -> None:
        """Read the tool's recipe, and of the other files those that only this tool has."""

    def finish(self, draft: Draft) -> None:
        """Add what shows in the draft alone."""


def _read_kinds(draft: Draft, files: Files) -> None:
    """Read the files of each kind, with DeepSpeed's defaults."""
    for kind in TABLES:
        for file in (file for known, file in files if known == kind):
            reader.read(draft, file, kind)
    if DEEPSPEED_KIND in draft.kinds:
        set_defaults(draft, alone=TRAINER_KIND not in draft.kinds)


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
