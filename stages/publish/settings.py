"""Fields of publish.hub, and its result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline import Durable

TOKEN = re.compile(r"\bhf_(?:oauth_|jwt_)[\w.-]+|\bhf_[A-Za-z0-9]{16,}|\bBearer\s+\S+")
LOGIN = "set the environment variable {}, or log in with `hf auth login`"


@dataclass(frozen=True, kw_only=True)
class HubFields:
    """The repository, and how to write to it."""

    repo: str
    """Repository on the hub, as `owner/name`. It is created if it is not there."""
    private: bool = True
    """Make the repository private when it is created. An existing repository keeps its visibility;
    while this is true, a public one is refused."""
    revision: str | None = None
    """Branch that the commit goes to; created from `main` if it is not there. null: `main`."""
    commit_message: str | None = None
    """First line of the commit. Names the run when not set."""
    token_env: str = "HF_TOKEN"
    """Name of the environment variable that holds a token with write access. Where it is not
    set, the login of `hf auth login` is used. The token itself must not be in a recipe."""
    dry_run: bool = False
    """Only list what would be uploaded and check the model card, without any network."""


@dataclass(frozen=True, kw_only=True)
class PublishedModel(Durable):
    """An exported model that can be fetched from a hub."""

    repo: str
    """`owner/name`."""
    commit: str | None
    """Hash of the commit that holds the model; None after a dry run, which published nothing."""
    url: str | None
    """Address of that commit."""

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> PublishedModel:
        """The artifact from its record, without asking the hub: resuming needs no network."""
        return cls(**record)
