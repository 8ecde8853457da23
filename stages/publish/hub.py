"""The stage `publish.hub`: the exported model as a repository on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pipeline import Context, ExportedModel, PlanView, Problem, worker_rank
from stages.publish.settings import LOGIN, TOKEN, HubFields, PublishedModel

OTHER_SOURCES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE")
"""Variables from which huggingface_hub gets a token if the recipe's variable is not set."""

_BRANCH = re.compile(r"(?!refs/|[0-9a-f]{40}$)\w[\w./-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class PublishHub(HubFields):
    """Upload the exported model to the Hugging Face Hub in one commit, then compare what is there
    with what was sent.

    Only files that the export lists are uploaded. Files of the same names are replaced, and nothing
    else in the repository is touched. A repository with other weights, which would be loaded with
    the model or instead of it, is refused.
    """

    nothing_to_plan: ClassVar[bool] = True

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
