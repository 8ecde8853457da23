"""The stage `publish.hub`: the exported model as a repository on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import Context, Durable, ExportedModel, PlanView, Problem, worker_rank

TOKEN = re.compile(r"\bhf_(?:oauth_|jwt_)[\w.-]+|\bhf_[A-Za-z0-9]{16,}|\bBearer\s+\S+")
OTHER_SOURCES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE")
"""Variables from which huggingface_hub gets a token if the recipe's variable is not set."""
LOGIN = "set the environment variable {}, or log in with `hf auth login`"

_BRANCH = re.compile(r"(?!refs/|[0-9a-f]{40}$)\w[\w./-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class PublishHub:
    """Upload the exported model to the Hugging Face Hub in one commit, then compare what is there
    with what was sent.

    Only files that the export lists are uploaded. Files of the same names are replaced, and nothing
    else in the repository is touched. A repository with other weights, which would be loaded with
    the model or instead of it, is refused.
    """

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

    def check(self, plan: PlanView) -> Iterator[Problem]:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            yield Problem(message=f"must be owner/name: {error}", key="repo")
        else:
            if "/" not in self.repo:
                yield Problem(message="must be owner/name", key="repo")
        if self.revision is not None and not _BRANCH.fullmatch(self.revision):
            yield Problem(message="must be the name of a branch", key="revision")
        if TOKEN.search(self.token_env) or not _VARIABLE.fullmatch(self.token_env):
            message = "must be the name of an environment variable, not the token itself"
            yield Problem(message=message, key="token_env")
        elif not self.dry_run and worker_rank() == 0:
            # Only rank 0 uses the hub; the others may be on machines without a network.
            yield from self._check_machine()

    def _check_machine(self) -> Iterator[Problem]:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            yield Problem(
                message="cannot upload: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set",
                hint="unset it, or set dry_run: true",
            )
        named = any(os.environ.get(name, "").strip() for name in (self.token_env, *OTHER_SOURCES))
        if not named and not Path(constants.HF_TOKEN_PATH).is_file():
            hint = f"{LOGIN.format(self.token_env)}, or set dry_run: true"
            yield Problem(message="no token for the hub", key="token_env", hint=hint)

    def run(self, ctx: Context, model: ExportedModel) -> PublishedModel:
        from stages.publish.upload import publish

        return publish(self, ctx, model)

    def run_dry(self, ctx: Context, model: ExportedModel) -> PublishedModel:
        return replace(self, dry_run=True).run(ctx, model)


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
