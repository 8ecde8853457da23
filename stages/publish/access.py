"""The token for the hub: where it comes from, and how it stays out of every text."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import StageError

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
