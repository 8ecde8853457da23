"""A model repository on the hub: the few requests that publishing takes."""

from __future__ import annotations

from collections.abc import Sequence

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.hf_api import RepoFile

from pipeline.errors import StageError

MAIN = "main"


class Repository:
    """A repository, and the branch of it that is published to. Its methods raise what
    huggingface_hub raises."""

    def __init__(self, repo: str, branch: str | None, *, token: str) -> None:
        self.repo = repo
        self.branch = branch or MAIN
        self.api = HfApi(token=token)

    def create(self, *, private: bool) -> None:
        """Make sure that there is a repository with the branch, and that it is not more public than
        asked for."""
        self.api.create_repo(self.repo, private=private, exist_ok=True)
        # The hub does not change who can see a repository that was there before.
        if private and not self.api.model_info(self.repo).private:
            raise StageError(
                f"{self.repo} is there already and is public",
                hint="publish to another one, make it private on the hub, or set private: false",
            )
        if self.branch != MAIN:
            self.api.create_branch(self.repo, branch=self.branch, exist_ok=True)

    def files(self, revision: str) -> dict[str, RepoFile]:
        """What a branch or a commit holds, by name."""
        entries = self.api.list_repo_tree(self.repo, recursive=True, revision=revision)
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def commit(self, additions: Sequence[CommitOperationAdd], message: str) -> CommitInfo:
        """Upload the files and commit them, all or none. Files that the branch holds already are
        not sent again; if it holds all of them, there is no new commit."""
        return self.api.create_commit(
            self.repo, additions, commit_message=message, revision=self.branch
        )
