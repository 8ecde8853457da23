"""A conversation with a model, kept from turn to turn; imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.contracts.text_model import Message, Writing, Written

if TYPE_CHECKING:
    from pipeline.contracts.text_model import TextModel


@dataclass(kw_only=True)
class Conversation:
    """The messages of a conversation with one model, and the settings of its answers."""

    writing: Writing
    system: str | None = None
    """Message that comes before the conversation."""
    plain: bool = False
    """Whether texts are continued as they are, separately, also where there is a template."""
    said: list[Message] = field(default_factory=list)
    """Messages of users and their answers, in turn."""

    def reset(self) -> None:
        """Drop what was said."""
        self.said = []

    def lays_out(self, model: TextModel) -> bool:
        """Whether messages take the model's chat template."""
        return model.has_template and not self.plain

    def say(self, model: TextModel, text: str, show: Callable[[str], object]) -> Written:
        """Have the model answer a message, and keep both; or, without a template, have it continue
        the text. `show` takes the pieces of the answer. Raises StageError, and keeps nothing
        then."""
        # equal messages may have different answers: each turn has its own seed
        how = replace(self.writing, seed=self.writing.seed + len(self.said))
        if not self.lays_out(model):
            return model.continue_text(text, how, show)
        before = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": text}
        written = model.answer([*before, *self.said, asked], how, show)
        self.said += [asked, {"role": "assistant", "content": written.text}]
        return written
