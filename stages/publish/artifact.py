"""The artifact that stages of this kind give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.artifacts import Durable


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
        return {"repo": self.repo, "commit": self.commit, "url": self.url}

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> PublishedModel:
        """The artifact from its record. The hub is not asked: to go on with a run needs no
        network."""
        return cls(repo=record["repo"], commit=record["commit"], url=record["url"])
