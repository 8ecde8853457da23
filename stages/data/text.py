"""Running text for language modelling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from pipeline.artifacts import Data, ModelSource
from pipeline.errors import Problem
from pipeline.stage import Context, PlanView
from stages.data.selection import Selection, problems


@dataclass(frozen=True, kw_only=True)
class TextData(Selection):
    """Train on running text: documents, one behind the other, cut into blocks of equal length.

    Every token is a target exactly once an epoch. A block may span several documents; attention
    crosses from one to the next unless they are kept apart. Text that spells a special token
    becomes that token. A plain text file that is one document is tokenised in one call, which takes
    some 25 times its size in memory.
    """

    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Key or column of the text in JSON and Parquet rows."""
    documents: Literal["file", "line"] = "file"
    """What one document of a .txt file is: the whole file, or every line that is not blank."""
    documents_apart: bool = False
    """Let no token attend to another document's, and none predict the first token of the next."""
    sequence_length: Annotated[int, Field(ge=1)] = 1024
    """Tokens per sample. The last one of the stream may be shorter."""
    append_eos: bool = True
    """Put the tokenizer's end token behind every document."""
    prepend_bos: bool = False
    """Put the tokenizer's start token before every document."""
    batch_documents: Annotated[int, Field(ge=1)] = 256
    """Documents per call of the tokenizer. Changes memory and speed, not the tokens."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        """What is wrong with the files and sources, as far as that shows without reading them."""
        yield from problems(self)

    def run(self, ctx: Context, model: ModelSource) -> Data:
        """Tokenise once, then map the tokens. Raises DataError for a file that cannot be used."""
        from stages.data.text_data import text_data

        return text_data(self, ctx, model)
