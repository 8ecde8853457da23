"""Rows that each become a sample: conversations, prompts with completions, texts, token ids."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from pipeline import Context, Data, ModelSource, PlanView, Problem
from stages.data.fields import Selection, Source, problems
from stages.data.forms import first_form
from stages.data.names import Names, name_problems
from stages.data.sources import find_files
from stages.model.config_checks import tokenizer_problems


@dataclass(frozen=True, kw_only=True)
class ChatSource(Source):
    """A source whose rows may use other names."""

    columns: dict[str, str] = field(default_factory=dict)
    """As the slot's `columns`, instead of them."""
    role_names: dict[str, str] = field(default_factory=dict)
    """As the slot's `role_names`, instead of them."""


@dataclass(frozen=True, kw_only=True)
class ChatData(Selection):
    """Train on rows that each become a sample, laid out by the tokenizer's chat template.

    A row's form is found by its keys: `messages` (OpenAI's: role and content, with tools),
    `conversations` (ShareGPT's), `prompt` and `completion` (both text or both lists of messages),
    `instruction` and `output` (Alpaca's), `text`, or `input_ids` (with `labels` or a `loss_mask`).
    All rows of a file have the same form. `tools`, `documents` and the entries of
    `chat_template_kwargs` in a row are passed to the template. A message with `train: false` is not
    trained on. Rows without a token to train on are dropped and reported.
    """

    sources: tuple[ChatSource, ...] = ()
    """Instead of `files`: several sources, mixed by weight. An epoch holds every sample of every
    source at least once, and repeats samples until the shares match the weights."""
    heldout_sources: tuple[ChatSource, ...] = ()
    """Instead of `heldout_files`: several sources to evaluate on, one after the other."""
    form: (
        Literal["messages", "sharegpt", "prompt/completion", "alpaca", "text", "input_ids"] | None
    ) = None
    """The form of all rows, for rows whose keys fit several. Null finds it by each row's keys."""
    roles: tuple[str, ...] = ()
    """Further roles of messages that the template knows, next to system, developer, user, assistant
    and tool."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names that the rows have for keys of theirs and of their messages, by the names used here:
    `{messages: dialog, role: speaker, content: text}`. What has the name of a key that another one
    stands for is not read."""
    role_names: dict[str, str] = field(default_factory=dict)
    """Roles that are meant by other names: `{bot: assistant}`."""
    template: bool = True
    """Whether a text prompt and its completion are a user's and an assistant's turn of the chat
    template. False joins them without it (Alpaca's with Alpaca's prompt), with the tokenizer's end
    token after the completion; messages always take the template."""
    today: str = "2024-07-26"
    """Date (YYYY-MM-DD) for templates that ask for today's, so that rows become the same tokens on
    every day. The default is the date that Llama 3.1's template falls back on."""
    loss: Literal["completion", "assistant", "last", "all"] = "completion"
    """Tokens that are trained on: the assistant's messages after the row's prompt (all of them in
    rows without one); all the assistant's messages; only its last turn, which suits templates that
    leave out parts of earlier answers; or all tokens. All of a `text` is trained on; `input_ids`
    have their own mask."""
    turns: Literal["together", "each"] = "together"
    """Whether a conversation is one sample, laid out whole, or each trained turn is
    a separate sample with the turns before it, laid out as at inference. Templates that leave the
    thoughts out of earlier turns need `each` (or `loss: last`) to train on all thoughts."""
    unrendered: Literal["error", "drop", "allow"] = "error"
    """Treatment of a row when the template leaves out part of it: a content, a call or its
    arguments, or the thoughts of a trained turn. `allow` trains on the rest."""
    empty: Literal["error", "drop", "train"] = "train"
    """Treatment of a row with an answer that says nothing: `train` trains on its end of turn."""
    special_tokens: Literal["error", "drop", "allow"] = "error"
    """Treatment of a row whose own text spells a special token of the tokenizer, such as the end of
    a turn. `allow` lets the text become that token."""
    prepend_bos: bool | None = None
    """Put the tokenizer's start token before a `text`, and before a pair that takes no template.
    Null does the same as the tokenizer does when it is called with a text: the tokenizers of Llama
    and Gemma put it there. A chat template has its own."""
    bad_rows: Literal["error", "drop"] = "error"
    """Treatment of rows that cannot be read or laid out: an error that shows the first of them and
    counts their kinds, or leave them out and say so. A file that cannot be read to its end is
    always an error."""
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    """Largest number of tokens per sample, as the tokenizer counts them: the last one is only
    predicted, so the model is given one less."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """Treatment of a longer row. A row that is truncated before its first target is dropped."""
    packing: bool = False
    """Put several rows in one sample of at most `sequence_length` tokens, by best fit. No row is
    cut, sees another or predicts its beginning."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        """Yield mistakes in the date, the files, the sources and the tokenizer that show without
        reading more than first rows."""
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
                    yield dataclasses.replace(problem, key=f"{key}.{index}.{problem.key}")
        plain = "`template: false` for pairs of texts" if self._needs_template() else None
        yield from tokenizer_problems(self, plan, no_template=plain)

    def names(self, source: Source | None = None) -> Names:
        """Return the names in a source: its own, or else the slot's."""
        own = source if isinstance(source, ChatSource) else self
        return Names(
            columns=own.columns or self.columns,
            role_names=own.role_names or self.role_names,
            roles=self.roles,
        )

    def _needs_template(self) -> bool:
        """Whether rows are certain to need the chat template: by `form`, or by the first row of
        each source's first file, since there may be thousands of files."""
        found: set[str | None] = {self.form}
        if self.form is None:
            firsts = ((find_files(one.files)[:1], self.names(one)) for one in self.trained_on())
            found = {first_form(path, names) for paths, names in firsts for path in paths}
        always = {"messages", "sharegpt"}
        return bool(found & (always | {"prompt/completion", "alpaca"} if self.template else always))

    def run(self, ctx: Context, model: ModelSource) -> Data:
        """Render and tokenise once, then map the samples. Raises DataError for an unusable row, and
        StageError if a source has no token to train on."""
        from stages.data.prepare import chat_data

        return chat_data(self, ctx, model)
