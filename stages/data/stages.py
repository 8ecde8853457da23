"""Stages that turn files into samples: running text, from files or from more shards than fit the
disk; and rows that each become a sample."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from pipeline import Context, Data, ModelSource, PlanView, Problem, traits
from pipeline.utils import address_problems, path_problems
from stages.data.fields import (
    ChatFields,
    ChatSource,
    DocumentSettings,
    Selection,
    StreamFields,
    problems,
)
from stages.data.forms import first_form
from stages.data.messages import name_problems
from stages.data.sources import each_pattern, file_problems, find_files
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
        from stages.data.documents import DocumentEntries

        work = DocumentEntries(self, self.cache, self.workers, ctx, model)
        return work.data(self, packed=self.documents_apart)


@dataclass(frozen=True, kw_only=True)
class StreamData(StreamFields):
    """Train on running text that is read a few shards at a time, from disks or object stores.

    Every shard is cut into blocks as `data.text` cuts its stream. Each epoch visits the shards in
    a new order, one window of them at a time; the blocks of a window are mixed. The order depends
    only on the shards, the tokenizer, the seed and these fields, so a resumed run continues
    exactly, and reads no window before its own. The number of blocks in an epoch is not
    known: the train slot takes `steps`.
    """

    has_epochs: ClassVar[bool] = False
    """Whether it is known how many samples an epoch has."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        """Yield mistakes in the files and the tokenizer, and a train slot that takes `epochs`."""
        local = tuple(each for each in each_pattern(self.shards) if "://" not in each)
        if local or not self.shards:
            yield from file_problems("shards", local)
        for index, each in enumerate(each_pattern(self.shards)):
            key = "shards" if isinstance(self.shards, str) else f"shards.{index}"
            yield from address_problems(key, each)
        if self.heldout_files:
            yield from file_problems("heldout_files", self.heldout_files)
        known = {path.resolve() for path in find_files(local)}
        for path in find_files(self.heldout_files):
            if path.resolve() in known:
                yield Problem(message=f"{path} is also trained on", key="heldout_files")
        yield from path_problems("cache", self.cache)
        yield from tokenizer_problems(self, plan)
        for stage in plan.readers(self):
            if isinstance(stage, traits.TrainsEpochs) and stage.epochs is not None:
                yield Problem(
                    message="does not know how many samples an epoch has",
                    key="shards",
                    hint="give the train slot `steps` instead of `epochs`",
                )

    def run(self, ctx: Context, model: ModelSource) -> Data:
        """List the shards; they are read when they are needed. Raises StageError."""
        from stages.data.shards import stream_data

        return stream_data(self, ctx, model)


@dataclass(frozen=True, kw_only=True)
class ChatData(ChatFields):
    """Train on rows that each become a sample, laid out by the tokenizer's chat template.

    A row's form is found by its keys: `messages` (OpenAI's: role and content, with tools),
    `conversations` (ShareGPT's), `prompt` and `completion` (both text or both lists of messages),
    `instruction` and `output` (Alpaca's), `text`, or `input_ids` (with `labels` or a `loss_mask`).
    All rows of a file have the same form. `tools`, `documents` and the entries of
    `chat_template_kwargs` in a row are passed to the template. A message with `train: false` is not
    trained on. Rows without a token to train on are dropped and reported.
    """

    def check(self, plan: PlanView) -> Iterator[Problem]:
        """Yield mistakes in fields, files and the tokenizer; reads no more than first rows."""
        try:
            datetime.datetime.strptime(self.today, "%Y-%m-%d")
        except ValueError:
            message = f"{self.today!r} is not a date"
            yield Problem(message=message, key="today", hint="write it as YYYY-MM-DD")
        if self.turns == "each" and self.loss == "all":
            message = "trains each answer on what comes before it, and `loss: all` on every token"
            yield Problem(message=message, key="turns", hint="leave out one of them")
        yield from problems(self)
        yield from name_problems(self.names())
        for key in ("sources", "heldout_sources"):
            for index, source in enumerate(getattr(self, key)):
                own = isinstance(source, ChatSource) and (source.columns or source.role_names)
                for problem in name_problems(self.names(source)) if own else ():
                    yield replace(problem, key=f"{key}.{index}.{problem.key}")
        forms: set[str | None] = {self.form}
        if self.form is None:
            trained, _ = self.all_sources()
            firsts = ((find_files(one.files)[:1], self.names(one)) for one in trained)
            forms = {first_form(path, names) for paths, names in firsts for path in paths}
        laid_out = {"messages", "sharegpt"}
        laid_out |= {"prompt/completion", "alpaca"} if self.template else set()
        plain = "`template: false` for pairs of texts" if forms & laid_out else None
        yield from tokenizer_problems(self, plan, no_template=plain)

    def run(self, ctx: Context, model: ModelSource) -> Data:
        """Render and tokenise once. Raises DataError, or StageError if there is no target."""
        from stages.data.chat_entries import ChatEntries

        return ChatEntries(self, ctx, model).data(self, packed=self.packing)
