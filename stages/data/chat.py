"""Rows that each become a sample: conversations, prompts with completions, texts, token ids."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline import Context, Data, ModelSource, PlanView, Problem
from stages.data.fields import ChatFields, ChatSource, problems
from stages.data.forms import first_form
from stages.data.messages import name_problems
from stages.data.sources import find_files
from stages.model.config_checks import tokenizer_problems


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
        plain = "`template: false` for pairs of texts" if self._needs_template() else None
        yield from tokenizer_problems(self, plan, no_template=plain)

    def _needs_template(self) -> bool:
        """Whether rows need the template, by `form` or by the first row of each source."""
        found: set[str | None] = {self.form}
        if self.form is None:
            firsts = ((find_files(one.files)[:1], self.names(one)) for one in self.trained_on())
            found = {first_form(path, names) for paths, names in firsts for path in paths}
        always = {"messages", "sharegpt"}
        return bool(found & (always | {"prompt/completion", "alpaca"} if self.template else always))

    def run(self, ctx: Context, model: ModelSource) -> Data:
        """Render and tokenise once. Raises DataError, or StageError if there is no target."""
        from stages.data.chat_entries import ChatEntries

        return ChatEntries(self, ctx, model).data(self, packed=self.packing)
