"""Conversations for supervised fine-tuning."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pipeline.artifacts import Data, ModelSource
from pipeline.errors import Problem, StageError
from pipeline.stage import Context, PlanView
from stages.data import heldout, tokenizers
from stages.data.cache import FORMAT, Counts, Entry, default_folder, digest, prepare
from stages.data.sources import JSON_LINES, PARQUET, Patterns, contents_digest, require

if TYPE_CHECKING:
    from stages.data.samples import SampleWriter

_SUFFIXES = JSON_LINES + PARQUET


@dataclass(frozen=True, kw_only=True)
class ChatData:
    """Train on what the assistant says in conversations, laid out by the tokenizer's chat template.

    A row has either `messages`, a list of {role, content}, or `prompt` and `completion`, which are
    both text or both lists of messages; all rows of a file have the same form. Loss is on the
    tokens of assistant messages (of the completion's, if there is a prompt) and on their
    end-of-turn token. `tools`, `documents` and the entries of `chat_template_kwargs` in a row are
    handed to the template; other keys are ignored. Rows without a token to train on are dropped
    and reported.
    """

    files: str | tuple[str, ...]
    """Paths or glob patterns of .jsonl, .json (one object a line; also with .gz) or .parquet files.
    Relative to the working directory."""
    template: bool = True
    """Whether a text `prompt` and `completion` are a user's and an assistant's turn of the chat
    template. False joins them as they are, with the tokenizer's end token behind the completion;
    `messages` always take the template."""
    turns: Literal["all", "last"] = "all"
    """Assistant messages that are trained on. `last` suits templates that leave out parts of
    earlier answers, such as their reasoning."""
    sequence_length: Annotated[int, Field(ge=1)] = 1024
    """Tokens per sample at most."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What becomes of a longer row. One that is truncated before its first target is dropped."""
    heldout_files: str | tuple[str, ...] = ()
    """Files to evaluate on, in the same forms as `files`."""
    heldout_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Hold out this part of the samples for evaluation, at least one: the last ones in file order,
    set aside before any shuffling. Instead of `heldout_files`."""
    cache: str | None = None
    """Folder for tokenised data. Default: `pipetrain` in $XDG_CACHE_HOME or ~/.cache."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        """Files that are not there, and held-out settings that exclude each other."""
        yield from heldout.check(self.files, self.heldout_files, self.heldout_fraction, _SUFFIXES)

    def run(self, ctx: Context, model: ModelSource) -> Data:
        """Render and tokenise once, then map the samples. Raises DataError for an unusable row, and
        StageError when a set has no token to train on."""
        from stages.data.samples import MaskedSamples

        tokenizer = self._tokenizer(model)
        dtype = tokenizers.id_dtype(tokenizer)
        train = self._entry(ctx, model, tokenizer, self.files)
        keys = [train.key]
        trained_on = heldout.split(train.counts["samples"], self.heldout_fraction)
        held = None
        if self.heldout_files:
            entry = self._entry(ctx, model, tokenizer, self.heldout_files)
            keys.append(entry.key)
            held = MaskedSamples(entry, dtype)
        elif self.heldout_fraction:
            held = MaskedSamples(train, dtype, trained_on)
        return Data(
            train=MaskedSamples(train, dtype, 0, trained_on),
            heldout=held,
            pad_id=tokenizers.pad_id(tokenizer),
            identity={
                "stage": "data.chat",
                "tokenizer": digest([tokenizers.identity(tokenizer), tokenizer.chat_template]),
                "contents": digest(keys),
                "sequence_length": self.sequence_length,
                "template": self.template,
                "turns": self.turns,
                "too_long": self.too_long,
                "heldout_fraction": self.heldout_fraction,
            },
        )

    def _tokenizer(self, model: ModelSource) -> Any:
        tokenizer = model.tokenizer()
        if not tokenizer.is_fast:
            raise StageError(
                f"{model.name}: its tokenizer cannot tell which characters a token stands for",
                hint="data.chat needs a tokenizer with a tokenizer.json",
            )
        if self.template and not tokenizer.chat_template:
            raise StageError(
                f"{model.name}: its tokenizer has no chat template",
                hint="use an instruction-tuned model, or `template: false` for text rows",
            )
        return tokenizer

    def _entry(self, ctx: Context, model: ModelSource, tokenizer: Any, files: Patterns) -> Entry:
        started = time.monotonic()
        entry = prepare(
            ctx,
            Path(self.cache).expanduser() if self.cache else default_folder(),
            lambda: self._key(tokenizer, files),
            lambda folder: self._build(ctx, tokenizer, files, folder),
        )
        tokenizers.check_ids(model, entry.counts["largest"])
        ctx.log.info(
            "chat: %(rows)d rows, %(dropped)d dropped, %(long)d too long, %(samples)d samples, "
            "%(tokens)d tokens, %(targets)d targets, %(seconds).1f s (%(how)s %(folder)s)",
            {
                **entry.counts,
                "seconds": time.monotonic() - started,
                "how": "cached in" if entry.reused else "tokenised into",
                "folder": entry.folder,
            },
        )
        return entry

    def _key(self, tokenizer: Any, files: Patterns) -> str:
        settings = [self.template, self.turns, self.sequence_length, self.too_long]
        identity = [tokenizers.identity(tokenizer), tokenizer.chat_template]
        contents = contents_digest(require(files, _SUFFIXES))
        return digest(["chat", FORMAT, contents, identity, settings])

    def _build(self, ctx: Context, tokenizer: Any, files: Patterns, folder: Path) -> Counts:
        from stages.data.conversations import read

        rows = read(require(files, _SUFFIXES), template=self.template)
        return self._writer(ctx, tokenizer).write(folder, rows)

    def _writer(self, ctx: Context, tokenizer: Any) -> SampleWriter:
        from stages.data.samples import SampleWriter
        from stages.data.turns import Encoder

        return SampleWriter(
            encode=Encoder(tokenizer, self.turns),
            dtype=tokenizers.id_dtype(tokenizer),
            sequence_length=self.sequence_length,
            too_long=self.too_long,
            log=ctx.log,
        )
