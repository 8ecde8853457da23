"""What the hub or the network refuses, in words for the person who has to act on it."""

from __future__ import annotations

import http
import textwrap
from collections.abc import Iterator

from pipeline.errors import StageError, in_words
from stages.publish.access import Access, masked

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
