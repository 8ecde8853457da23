"""Running text for language modelling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline import Context, Data, ModelSource, PlanView, Problem
from stages.data.fields import DocumentSettings, Selection, problems
from stages.model.config_checks import tokenizer_problems


@dataclass(frozen=True, kw_only=True)
class TextData(DocumentSettings, Selection):
    """Train on running text: documents, one after the other, cut into blocks of equal length.

    Every token is a target exactly once an epoch. A block may span several documents; attention
    crosses from one to the next unless they are kept apart. Text that spells a special token
    becomes that token. A plain text file that is one document is read whole. A tokenizer that is
    not known to split text between words takes it in one call, which needs some 25 times its size
    in memory.
    """

    def check(self, plan: PlanView) -> Iterator[Problem]:
        """Yield mistakes in the files and sources that show without reading them."""
        yield from problems(self)
        yield from tokenizer_problems(self, plan)

    def run(self, ctx: Context, model: ModelSource) -> Data:
        """Tokenise once, then map the tokens. Raises DataError for a file that cannot be used."""
        from stages.data.prepare import text_data

        return text_data(self, ctx, model)
