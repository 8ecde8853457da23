"""The fields that say how documents become blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class DocumentSettings:
    """Base of stages that cut a stream of documents into blocks."""

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
    prepend_bos: bool | None = None
    """Put the tokenizer's start token before every document. Null does what the tokenizer itself
    does when it is called with a text: those of Llama and Gemma begin it with that token."""
    batch_documents: Annotated[int, Field(ge=1)] = 256
    """Documents per call of the tokenizer. Changes memory and speed, not the tokens."""
