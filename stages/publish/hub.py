"""The stage `publish.hub`: the exported model as a repository on the Hugging Face Hub.

Rank 0 lists the files of an export, uploads them and compares what arrived; the others wait.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from pipeline import (
    Context,
    Durable,
    ExportedModel,
    PlanView,
    Problem,
    StageError,
    in_words,
    worker_rank,
)
from pipeline.utils import align, human, plural

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.hf_api import RepoFile

TOKEN = re.compile(r"\bhf_(?:oauth_|jwt_)[\w.-]+|\bhf_[A-Za-z0-9]{16,}|\bBearer\s+\S+")
LOGIN = "set the environment variable {}, or log in with `hf auth login`"
OTHER_SOURCES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE")
"""Variables from which huggingface_hub gets a token if the recipe's variable is not set."""
MAIN = "main"
CARD = "README.md"
NOT_ALLOWED = (401, 403, 404)
"""HTTP statuses of missing permissions: a repository that a token may not see is not found."""

_BRANCH = re.compile(r"(?!refs/|[0-9a-f]{40}$)\w[\w./-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


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


@dataclass(frozen=True, kw_only=True)
class PublishHub:
    """Upload the exported model to the Hugging Face Hub in one commit, then compare what is there
    with what was sent.

    Only files that the export lists are uploaded. Files of the same names are replaced, and nothing
    else in the repository is touched. A repository with other weights, which would be loaded with
    the model or instead of it, is refused.
    """

    nothing_to_plan: ClassVar[bool] = True

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
        from huggingface_hub import constants
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(self.repo)
            wrong = "" if "/" in self.repo else "must be owner/name"
        except HFValidationError as error:
            wrong = f"must be owner/name: {error}"
        if wrong:
            yield Problem(message=wrong, key="repo")
        if self.revision is not None and not _BRANCH.fullmatch(self.revision):
            yield Problem(message="must be the name of a branch", key="revision")
        if TOKEN.search(self.token_env) or not _VARIABLE.fullmatch(self.token_env):
            message = "must be the name of an environment variable, not the token itself"
            yield Problem(message=message, key="token_env")
        elif not self.dry_run and worker_rank() == 0:
            # Only rank 0 uses the hub; the others may be on machines without a network.
            if constants.HF_HUB_OFFLINE:
                message = "cannot upload: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
                yield Problem(message=message, hint="unset it, or set dry_run: true")
            names = (self.token_env, *OTHER_SOURCES)
            given = any(os.environ.get(name, "").strip() for name in names)
            if not given and not Path(constants.HF_TOKEN_PATH).is_file():
                hint = f"{LOGIN.format(self.token_env)}, or set dry_run: true"
                yield Problem(message="no token for the hub", key="token_env", hint=hint)

    def run(self, ctx: Context, model: ExportedModel) -> PublishedModel:
        record = json.dumps(_publish(self, ctx, model).record()) if ctx.dist.is_main else None
        return PublishedModel.restore(json.loads(ctx.dist.broadcast_str(record)))

    def run_dry(self, ctx: Context, model: ExportedModel) -> PublishedModel:
        return replace(self, dry_run=True).run(ctx, model)


def _publish(stage: PublishHub, ctx: Context, model: ExportedModel) -> PublishedModel:
    from huggingface_hub import HfApi, ModelCard, get_token

    files = contents(model)
    if CARD in files:
        try:
            ModelCard.load(files[CARD]).data.to_yaml()
        except (ValueError, TypeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise StageError(f"{files[CARD]}: its metadata cannot be read: {reason}") from error
    sizes = {name: path.stat().st_size for name, path in files.items()}
    found = f"{plural(len(files), 'file')}, {human(sum(sizes.values()))}"
    ctx.log.info("%s, for %s:", found, stage.repo)
    for line in align([(f"  {name}", human(size)) for name, size in sizes.items()]):
        ctx.log.info("%s", line)
    if stage.dry_run:
        ctx.log.info("dry run: nothing was uploaded")
        return PublishedModel(repo=stage.repo, commit=None, url=None)
    token = ""
    try:
        token = os.environ.get(stage.token_env, "").strip() or get_token() or ""
        if not token:
            raise StageError("no token for the hub", hint=LOGIN.format(stage.token_env))
        return _upload(stage, ctx, files, HfApi(token=token))
    except StageError:
        raise
    except Exception as error:
        from huggingface_hub.errors import HfHubHTTPError

        ctx.log.debug("%s", _masked("".join(traceback.format_exception(error)), token))
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, HfHubHTTPError):
            cause = cause.__cause__
        hint = f"the export is untouched; retry with: pipe resume {shlex.quote(str(ctx.run_dir))}"
        if isinstance(cause, HfHubHTTPError) and cause.response.status_code in NOT_ALLOWED:
            hint = (
                f"the token must be valid and allow to write to the repositories of "
                f"{stage.repo.partition('/')[0]}; it comes from ${stage.token_env} or, if that is "
                f"not set, from the hub login; {hint}"
            )
        # A proxy may answer with a page.
        reason = textwrap.shorten(_masked(in_words(cause or error), token), 600, placeholder=" ...")
        # `from None`: a traceback with the cause would show what is masked here.
        raise StageError(f"cannot publish to {stage.repo}: {reason}", hint=hint) from None


def contents(model: ExportedModel) -> dict[str, Path]:
    """All listed files by name. Raises StageError for one that is missing or elsewhere."""
    found = {}
    for place in (model.folder / listed for listed in model.files):
        inside = [path for path in place.rglob("*") if not path.is_dir()]
        for path in inside if place.is_dir() else [place]:
            if not path.is_file():
                hint = "export again, into another folder"
                raise StageError(f"a file of the export is gone: {path}", hint=hint)
            if not path.resolve().is_relative_to(model.folder.resolve()):
                raise StageError(f"a file that the export lists is not in its folder: {path}")
            found[path.relative_to(model.folder).as_posix()] = path
    if not found:
        raise StageError(f"the export in {model.folder} lists no files")
    return dict(sorted(found.items()))


def _upload(
    stage: PublishHub, ctx: Context, files: Mapping[str, Path], api: HfApi
) -> PublishedModel:
    from huggingface_hub import CommitOperationAdd

    repo, branch = stage.repo, stage.revision or MAIN
    api.create_repo(repo, private=stage.private, exist_ok=True)
    # The hub does not change the visibility of an existing repository.
    if stage.private and not api.model_info(repo).private:
        raise StageError(
            f"{repo} is there already and is public",
            hint="publish to another one, make it private on the hub, or set private: false",
        )
    if branch != MAIN:
        api.create_branch(repo, branch=branch, exist_ok=True)
    # Loaders take files of these names for weights: a shard, an index, an adapter.
    loaded = re.compile(r"adapter_config\.json|[^/]*\.safetensors(\.index\.json)?")
    there = _remote(api, repo, branch)
    if others := [name for name in there if name not in files and loaded.fullmatch(name)]:
        raise StageError(
            f"{repo} ({branch}) holds other weights, which would be loaded with the model or "
            f"instead of it: {', '.join(sorted(others)[:10])}",
            hint="delete them there, or publish to another repository",
        )
    additions = [CommitOperationAdd(name, path) for name, path in files.items()]
    message = stage.commit_message or f"Upload the model of the run {ctx.run_dir.name}"
    # Sends only files that the branch lacks; without any, there is no new commit.
    commit = api.create_commit(repo, additions, commit_message=message, revision=branch)
    remote = _remote(api, repo, commit.oid)
    if found := [text for each in additions for text in _differences(each, remote)]:
        raise StageError(
            f"{repo} does not hold at {commit.oid} what was uploaded: {'; '.join(found[:10])}",
            hint="the export is untouched; `pipe resume` uploads what differs again",
        )
    ctx.log.info("published, and compared with the export: %s", commit.commit_url)
    return PublishedModel(repo=repo, commit=commit.oid, url=str(commit.commit_url))


def _remote(api: HfApi, repo: str, revision: str) -> dict[str, RepoFile]:
    """Files of a branch or a commit, by name."""
    from huggingface_hub.hf_api import RepoFile

    entries = api.list_repo_tree(repo, recursive=True, revision=revision)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _differences(addition: CommitOperationAdd, remote: Mapping[str, RepoFile]) -> Iterator[str]:
    """Descriptions of how a remote file differs from the uploaded one in size or hash."""
    from huggingface_hub.utils.sha import git_hash

    name, sent = addition.path_in_repo, addition.upload_info
    found = remote.get(name)
    if found is None:
        yield f"{name} is not there"
    elif found.size != sent.size:
        yield f"{name} has {found.size} bytes instead of {sent.size}"
    elif found.lfs is not None:
        if found.lfs.sha256 != sent.sha256.hex():
            yield f"{name} has another sha256"
    elif found.blob_id != git_hash(Path(str(addition.path_or_fileobj)).read_bytes()):
        yield f"{name} has other contents"


def _masked(text: str, token: str) -> str:
    """The text without the token, and without anything that looks like one."""
    return TOKEN.sub("<token>", text.replace(token, "<token>") if token else text)
