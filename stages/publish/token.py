"""What the hub or the network refuses, in words for the person who has to act on it."""

from __future__ import annotations

import http
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import StageError, in_words

LOOKS_LIKE_TOKEN = re.compile(r"\bhf_(?:oauth_|jwt_)[\w.-]+|\bhf_[A-Za-z0-9]{16,}|\bBearer\s+\S+")
OTHER_SOURCES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE")
"""Variables from which huggingface_hub has a token where the recipe's variable is not set."""
MASK = "<token>"


@dataclass(frozen=True, kw_only=True)
class Access:
    """A token, and what a person calls the place where it was found."""

    token: str = field(repr=False)
    source: str


def certainly_none(variable: str) -> bool:
    """Whether no token can be found on this machine, as far as that can be told without asking
    anybody."""
    from huggingface_hub import constants

    named = any(os.environ.get(name, "").strip() for name in (variable, *OTHER_SOURCES))
    return not named and not Path(constants.HF_TOKEN_PATH).is_file()


def find_access(variable: str) -> Access:
    """The token in the environment variable, or else that of the hub's own login. Raises StageError
    when there is neither."""
    own = os.environ.get(variable, "").strip()
    if own:
        return Access(token=own, source=f"in ${variable}")
    from huggingface_hub import get_token

    stored = get_token()
    if not stored:
        raise StageError("there is no token for the hub", hint=how_to_get_one(variable))
    return Access(token=stored, source="of the hub login")


def how_to_get_one(variable: str) -> str:
    """What to do about a missing token."""
    return f"set the environment variable {variable}, or log in with `hf auth login`"


def masked(text: str, *tokens: str) -> str:
    """The text without the tokens, and without what looks like one."""
    for token in tokens:
        text = text.replace(token, MASK)
    return LOOKS_LIKE_TOKEN.sub(MASK, text)


NOT_ALLOWED = (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN, http.HTTPStatus.NOT_FOUND)
"""The hub says that a repository is not there when the token may not see it."""
LONGEST = 600
"""Characters of what others say; a proxy may answer with a page."""


def refusal(error: Exception, repo: str, access: Access | None, retry: str) -> StageError:
    """The error without any token in it, and with what to do about it."""
    causes = list(_causes(error))
    text = masked(_text(causes), *([access.token] if access else []))
    hint = f"the export is untouched; {retry}"
    if access and any(_status(each) in NOT_ALLOWED for each in causes):
        hint = f"{_permission(repo, access)}; {hint}"
    reason = textwrap.shorten(text, LONGEST, placeholder=" ...")
    return StageError(f"cannot publish to {repo}: {reason}", hint=hint)


def _permission(repo: str, access: Access) -> str:
    owner = repo.partition("/")[0]
    return (
        f"the token {access.source} must be valid and allow to write: one of the kind `write`, "
        f"or a fine-grained one with write access to the repositories of {owner}"
    )


def _causes(error: Exception) -> Iterator[Exception]:
    """The error and what it wraps, down to the hub's answer if there was one."""
    cause: BaseException | None = error
    while isinstance(cause, Exception):
        yield cause
        cause = None if _status(cause) else cause.__cause__


def _text(causes: list[Exception]) -> str:
    """All that they say, once."""
    text = ""
    for cause in causes:
        if not text or str(cause) not in text:
            text += f"{': ' if text else ''}{in_words(cause)}"
    return text


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
