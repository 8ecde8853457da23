"""Names that a recipe gives, and what is wrong with them. Nobody is asked."""

from __future__ import annotations

import re

from stages.publish.access import LOOKS_LIKE_TOKEN

BRANCH = re.compile(r"[A-Za-z0-9_](?:[\w./-]*[A-Za-z0-9_-])?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def repo_mistake(repo: str) -> str:
    """Why this is no `owner/name`; empty when it is."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    owner, _, name = repo.partition("/")
    if not owner or not name or "/" in name:
        return "must be owner/name"
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        return str(error)
    return ""


def branch_mistake(branch: str) -> str:
    """Why there can be no branch of this name; empty when there can."""
    if COMMIT.fullmatch(branch) or branch.startswith("refs/"):
        return "must be a branch, not a commit or a reference"
    if not BRANCH.fullmatch(branch) or ".." in branch or "//" in branch:
        return "cannot be the name of a branch"
    return ""


def variable_mistake(name: str) -> str:
    """Why this is no environment variable's name; empty when it is. Does not repeat the name, which
    may be a token."""
    if LOOKS_LIKE_TOKEN.search(name):
        return "must be the name of an environment variable, not the token itself"
    if not VARIABLE.fullmatch(name):
        return "must be the name of an environment variable"
    return ""
