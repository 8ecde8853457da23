"""The stage `publish.hub`: the exported model as a repository on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.contracts.export import ExportedModel
from pipeline.contracts.stage import Context, Durable, PlanView
from pipeline.distributed.environment import worker_rank
from pipeline.errors import Problem
from stages.publish.token import LOOKS_LIKE_TOKEN, certainly_none, how_to_get_one


@dataclass(frozen=True, kw_only=True)
class PublishHub:
    """Upload the exported model to the Hugging Face Hub in one commit, then compare what is there
    with what was sent.

    Only files that the export lists are uploaded. Files of the same names are replaced, and nothing
    else in the repository is touched; one that holds other weights, which would be loaded with the
    model or instead of it, is refused.
    """

    repo: str
    """Repository on the hub, as `owner/name`. It is created if it is not there."""
    private: bool = True
    """Make the repository private when it is created. One that is there already keeps what it is;
    while this is true, a public one is refused."""
    revision: str | None = None
    """Branch that the commit goes to; created from `main` if it is not there. `main` when not
    set."""
    commit_message: str | None = None
    """First line of the commit. Names the run when not set."""
    token_env: str = "HF_TOKEN"
    """Name of the environment variable that holds a token with write access. Where it is not
    set, the login of `hf auth login` is used. The token itself must not be in a recipe."""
    dry_run: bool = False
    """Only list what would be uploaded and check the model card, without any network."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        mistakes = {
            "repo": repo_mistake(self.repo),
            "revision": "" if self.revision is None else branch_mistake(self.revision),
            "token_env": variable_mistake(self.token_env),
        }
        if self.commit_message is not None and not self.commit_message.strip():
            mistakes["commit_message"] = "must not be empty"
        for key, mistake in mistakes.items():
            if mistake:
                yield Problem(message=mistake, key=key)
        # Only rank 0 talks to the hub; the others may be on machines that cannot.
        if not self.dry_run and worker_rank() == 0 and not mistakes["token_env"]:
            yield from self._check_machine()

    def _check_machine(self) -> Iterator[Problem]:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            yield Problem(
                message="cannot upload: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set",
                hint="unset it, or set dry_run: true",
            )
        if certainly_none(self.token_env):
            hint = f"{how_to_get_one(self.token_env)}, or set dry_run: true"
            yield Problem(message="no token for the hub", key="token_env", hint=hint)

    def run(self, ctx: Context, model: ExportedModel) -> PublishedModel:
        from stages.publish.upload import publish

        return publish(self, ctx, model)

    def run_dry(self, ctx: Context, model: ExportedModel) -> PublishedModel:
        return replace(self, dry_run=True).run(ctx, model)


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
