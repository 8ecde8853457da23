"""What a row becomes before it is tokenised, whatever its form was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.data.rows import Row


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for the chat template."""

    row: Row
    messages: Sequence[Mapping[str, Any]]
    first: int = 0
    """Index of the first message behind the row's prompt; 0 without one."""
    silent: frozenset[int] = frozenset()
    """Indices of messages that are not trained on, whatever is asked for."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the chat template: `tools`, `documents`, and what the row has under
    `chat_template_kwargs`."""

    def texts(self) -> list[Any]:
        """All that the row itself says, in which a special token has no place."""
        return [*self.messages, self.extra]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A prompt and the text behind it, as they are; no chat template. Without a prompt the text is
    a document of its own."""

    row: Row
    prompt: str
    completion: str

    def texts(self) -> list[Any]:
        """All that the row itself says."""
        return [self.prompt, self.completion]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids and, for each, whether it is trained on."""

    row: Row
    ids: Sequence[int]
    trained: Sequence[bool]


Item = Conversation | Completion | Tokens
