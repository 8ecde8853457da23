"""Translators of tools whose recipe is one file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pipeline import UsageError
from pipeline.importing import ConfigFile, KeyOutcome, Request, Translation, Translator
from stages.importing.engines import set_defaults
from stages.importing.meaning import Company, meaning
from stages.importing.reader import ACCELERATE_KIND, DEEPSPEED_KIND, Reader, kind_of
from stages.importing.recipe import compose
from stages.importing.report import Draft
from stages.importing.rules import Table
from stages.importing.sources import several
from stages.importing.tools import tool_of


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
        found = kind_of(content)
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
        reader = Reader(files)
        others = [file for file in files if file is not recipes[0]]
        self.read(reader, recipes[0], others, request)
        for kind in self.beside:
            for file in others:
                if self.kind(file.content) == kind:
                    reader.read(file, kind)
        if DEEPSPEED_KIND in reader.kinds:
            set_defaults(reader.report, alone=False)
        draft = compose(reader.report, request, recipes[0].path.stem, several)
        self.finish(draft)
        return reader.translation(draft)

    def meaning(self, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        return meaning(key, content, self.table, self.companies, self._draft)

    def _draft(self, file: ConfigFile) -> Draft:
        reader = Reader([file])
        self.read(reader, file, (), Request())
        draft = compose(reader.report, Request(), "recipe", several)
        self.finish(draft)
        return draft

    @abstractmethod
    def read(
        self, reader: Reader, recipe: ConfigFile, others: Sequence[ConfigFile], request: Request
    ) -> None:
        """Read the tool's recipe, and of the other files those that only this tool has."""

    def finish(self, draft: Draft) -> None:
        """Add what shows in the draft alone."""
