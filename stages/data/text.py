"""Plain text for language modelling."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pipeline.artifacts import Data, ModelSource
from pipeline.errors import DataError, Problem
from pipeline.stage import Context, PlanView
from stages.data import heldout, tokenizers
from stages.data.cache import FORMAT, Counts, default_folder, digest, prepare
from stages.data.documents import DocumentReader
from stages.data.sources import JSON_LINES, PARQUET, TEXT, Patterns, contents_digest, require

if TYPE_CHECKING:
    from stages.data.blocks import TokenBlocks

_SUFFIXES = TEXT + JSON_LINES + PARQUET


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Train on running text: documents, one behind the other, cut into blocks of equal length.

    Every token is a target exactly once an epoch. A block may span several documents; attention
    crosses from one to the next. Text that spells a special token becomes that token.
    """

    files: str | tuple[str, ...]
    """Paths or glob patterns of .txt, .jsonl, .json (one object a line) or .parquet files; all but
    the last also with .gz. Relative to the working directory. A plain text file that is one
    document is tokenised in one call, which takes some 25 times its size in memory."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Key or column of the text in JSON and Parquet rows."""
    documents: Literal["file", "line"] = "file"
    """What one document of a .txt file is: the whole file, or every line that is not blank."""
    sequence_length: Annotated[int, Field(ge=1)] = 1024
    """Tokens per sample. The last one of the stream may be shorter."""
    append_eos: bool = True
    """Put the tokenizer's end token behind every document."""
    prepend_bos: bool = False
    """Put the tokenizer's start token before every document."""
    heldout_files: str | tuple[str, ...] = ()
    """Files to evaluate on, in the same forms as `files`."""
    heldout_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Hold out this part of the blocks for evaluation, at least one: the last ones in file order,
    set aside before any shuffling. Instead of `heldout_files`."""
    batch_documents: Annotated[int, Field(ge=1)] = 256
    """Documents per call of the tokenizer. Changes memory and speed, not the tokens."""
    cache: str | None = None
    """Folder for tokenised data. Default: `pipetrain` in $XDG_CACHE_HOME or ~/.cache."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        """Files that are not there, and held-out settings that exclude each other."""
        yield from heldout.check(self.files, self.heldout_files, self.heldout_fraction, _SUFFIXES)

    def run(self, ctx: Context, model: ModelSource) -> Data:
        """Tokenise once, then map the tokens. Raises DataError for a file that cannot be used."""
        from stages.data.blocks import TokenBlocks

        tokenizer = model.tokenizer()
        train, keys = self._stream(ctx, model, tokenizer, self.files)
        trained_on = heldout.split(len(train), self.heldout_fraction)
        tokens, length = train.tokens, self.sequence_length
        held = None
        if self.heldout_files:
            held, held_key = self._stream(ctx, model, tokenizer, self.heldout_files)
            keys += held_key
        elif trained_on < len(train):
            held = TokenBlocks(tokens, length, trained_on)
        return Data(
            train=TokenBlocks(tokens, length, 0, trained_on),
            heldout=held,
            pad_id=tokenizers.pad_id(tokenizer),
            identity={
                "stage": "data.text",
                "tokenizer": tokenizers.identity(tokenizer),
                "contents": digest(keys),
                "sequence_length": length,
                "append_eos": self.append_eos,
                "prepend_bos": self.prepend_bos,
                "documents": self.documents,
                "heldout_fraction": self.heldout_fraction,
            },
        )

    def _stream(
        self, ctx: Context, model: ModelSource, tokenizer: Any, files: Patterns
    ) -> tuple[TokenBlocks, list[str]]:
        """All blocks of a set of files, and the key of their tokens."""
        from stages.data.blocks import TOKENS, TokenBlocks

        started = time.monotonic()
        dtype = tokenizers.id_dtype(tokenizer)
        entry = prepare(
            ctx,
            Path(self.cache).expanduser() if self.cache else default_folder(),
            lambda: self._key(tokenizer, files),
            lambda folder: self._build(ctx, tokenizer, files, folder),
        )
        tokenizers.check_ids(model, entry.counts["largest"])
        blocks = TokenBlocks(entry.array(TOKENS, dtype), self.sequence_length)
        if not len(blocks):
            raise DataError("fewer than two tokens of text", file=str(files))
        ctx.log.info(
            "text: %d documents, %d tokens, %d samples, %d targets, %.1f s (%s %s)",
            entry.counts["documents"],
            entry.counts["tokens"],
            len(blocks),
            entry.counts["tokens"] - 1,
            time.monotonic() - started,
            "cached in" if entry.reused else "tokenised into",
            entry.folder,
        )
        return blocks, [entry.key]

    def _key(self, tokenizer: Any, files: Patterns) -> str:
        settings = [self.text_key, self.documents, self.append_eos, self.prepend_bos]
        contents = contents_digest(require(files, _SUFFIXES))
        return digest(["text", FORMAT, contents, tokenizers.identity(tokenizer), settings])

    def _build(self, ctx: Context, tokenizer: Any, files: Patterns, folder: Path) -> Counts:
        from stages.data.blocks import TokenWriter

        start, end = [], []
        if self.prepend_bos:
            start = [tokenizers.required_id(tokenizer, "bos_token", "prepend_bos")]
        if self.append_eos:
            end = [tokenizers.required_id(tokenizer, "eos_token", "append_eos")]
        writer = TokenWriter(
            tokenizer=tokenizer,
            dtype=tokenizers.id_dtype(tokenizer),
            prefix=start,
            suffix=end,
            batch_documents=self.batch_documents,
            log=ctx.log,
        )
        reader = DocumentReader(text_key=self.text_key, unit=self.documents)
        return writer.write(folder, reader.read(require(files, _SUFFIXES)))
