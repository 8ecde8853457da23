"""The stage `publish.hub`: the exported model as a repository on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.artifacts import ExportedModel
from pipeline.errors import Problem
from pipeline.launch.environment import worker_rank
from pipeline.stage import Context, PlanView
from stages.publish.access import certainly_none, how_to_get_one
from stages.publish.artifact import PublishedModel
from stages.publish.names import branch_mistake, repo_mistake, variable_mistake


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
        from stages.publish.steps import publish

        return publish(self, ctx, model)

    def rehearse(self, ctx: Context, model: ExportedModel) -> PublishedModel:
        return replace(self, dry_run=True).run(ctx, model)
