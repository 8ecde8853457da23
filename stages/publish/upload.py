"""Publish an export: list its files, upload them, compare. Rank 0 works, the others wait."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from pipeline import Context, ExportedModel, StageError, in_words
from pipeline.utils import align, human, plural
from stages.publish.settings import LOGIN, TOKEN, HubFields, PublishedModel

MAIN = "main"
CARD = "README.md"
NOT_ALLOWED = (401, 403, 404)
"""HTTP statuses of missing permissions: a repository that a token may not see is not found."""


def publish(stage: HubFields, ctx: Context, model: ExportedModel) -> PublishedModel:
    """Upload on rank 0; every rank returns the same record."""
    record = json.dumps(_publish(stage, ctx, model).record()) if ctx.dist.is_main else None
    return PublishedModel.restore(json.loads(ctx.dist.broadcast_str(record)))


def _publish(stage: HubFields, ctx: Context, model: ExportedModel) -> PublishedModel:
    files = contents(model)
    _require_readable_card(files)
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
        ctx.log.debug("%s", masked("".join(traceback.format_exception(error)), token))
        # `from None`: a traceback with the cause would show what is masked here.
        raise _refusal(error, stage, ctx, token) from None


def _upload(
    stage: HubFields, ctx: Context, files: Mapping[str, Path], api: HfApi
) -> PublishedModel:
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
    others = [name for name in _remote(api, repo, branch) if name not in files and _loaded(name)]
    if others:
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
    found = [text for each in additions for text in _differences(each, remote)]
    if found:
        raise StageError(
            f"{repo} does not hold at {commit.oid} what was uploaded: {'; '.join(found[:10])}",
            hint="the export is untouched; `pipe resume` uploads what differs again",
        )
    ctx.log.info("published, and compared with the export: %s", commit.commit_url)
    return PublishedModel(repo=repo, commit=commit.oid, url=str(commit.commit_url))


def _remote(api: HfApi, repo: str, revision: str) -> dict[str, RepoFile]:
    """Files of a branch or a commit, by name."""
    entries = api.list_repo_tree(repo, recursive=True, revision=revision)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _loaded(name: str) -> bool:
    """Whether loaders take a file of this name for weights: a shard, an index, an adapter."""
    ending = (".safetensors", ".safetensors.index.json")
    return name == "adapter_config.json" or ("/" not in name and name.endswith(ending))


def _differences(addition: CommitOperationAdd, remote: Mapping[str, RepoFile]) -> Iterator[str]:
    """Descriptions of how a remote file differs from the uploaded one in size or hash."""
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


def contents(model: ExportedModel) -> dict[str, Path]:
    """All listed files by name. Raises StageError for one that is missing or elsewhere."""
    found = {}
    for place in (model.folder / listed for listed in model.files):
        inside = [path for path in place.rglob("*") if not path.is_dir()]
        for path in inside if place.is_dir() else [place]:
            if not path.is_file():
                raise StageError(
                    f"a file of the export is gone: {path}",
                    hint="export again, into another folder",
                )
            if not path.resolve().is_relative_to(model.folder.resolve()):
                raise StageError(f"a file that the export lists is not in its folder: {path}")
            found[path.relative_to(model.folder).as_posix()] = path
    if not found:
        raise StageError(f"the export in {model.folder} lists no files")
    return dict(sorted(found.items()))


def _require_readable_card(files: Mapping[str, Path]) -> None:
    if CARD in files:
        try:
            ModelCard.load(files[CARD]).data.to_yaml()
        except (ValueError, TypeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise StageError(f"{files[CARD]}: its metadata cannot be read: {reason}") from error


def masked(text: str, token: str) -> str:
    """The text without the token, and without anything that looks like one."""
    return TOKEN.sub("<token>", text.replace(token, "<token>") if token else text)


def _answer(error: BaseException) -> BaseException:
    """The hub's answer that led to the error; the error itself without one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    return cause or error


def _refusal(error: BaseException, stage: HubFields, ctx: Context, token: str) -> StageError:
    """An error of the hub or the network, without any token in it."""
    error = _answer(error)
    reason = masked(in_words(error), token)
    hint = f"the export is untouched; retry with: pipe resume {shlex.quote(str(ctx.run_dir))}"
    if isinstance(error, HfHubHTTPError) and error.response.status_code in NOT_ALLOWED:
        hint = (
            f"the token must be valid and allow to write to the repositories of "
            f"{stage.repo.partition('/')[0]}; it comes from ${stage.token_env} or, if that is not "
            f"set, from the hub login; {hint}"
        )
    reason = textwrap.shorten(reason, 600, placeholder=" ...")  # a proxy may answer with a page
    return StageError(f"cannot publish to {stage.repo}: {reason}", hint=hint)
