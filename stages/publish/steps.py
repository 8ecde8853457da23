"""Publish an export: list, check, upload, compare. Rank 0 works, the others wait."""

from __future__ import annotations

import json
import shlex
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from huggingface_hub import CommitOperationAdd

from pipeline.artifacts import ExportedModel
from pipeline.errors import StageError
from stages.publish.access import Access, find_access, masked
from stages.publish.artifact import PublishedModel
from stages.publish.card import check_card
from stages.publish.comparison import differences, other_weights
from stages.publish.contents import LocalFile, contents
from stages.publish.refusal import refusal
from stages.publish.repository import Repository

if TYPE_CHECKING:
    from pipeline.stage import Context
    from stages.publish.hub import PublishHub


def publish(stage: PublishHub, ctx: Context, model: ExportedModel) -> PublishedModel:
    """Upload on rank 0; every rank returns the same record."""
    record = None
    if ctx.dist.is_main:
        record = json.dumps(_publish(stage, ctx, model).record())
    return PublishedModel.restore(json.loads(ctx.dist.share(record)))


def _publish(stage: PublishHub, ctx: Context, model: ExportedModel) -> PublishedModel:
    files = contents(model)
    check_card(files)
    _list(stage, ctx, files)
    if stage.dry_run:
        ctx.log.info("dry run: nothing was uploaded")
        return PublishedModel(repo=stage.repo, commit=None, url=None)
    return _guarded(stage, ctx, files)


def _list(stage: PublishHub, ctx: Context, files: Sequence[LocalFile]) -> None:
    total = sum(file.size for file in files)
    ctx.log.info("%d file(s), %s bytes, for %s:", len(files), f"{total:,}", stage.repo)
    for file in files:
        ctx.log.info("  %s  %s bytes", file.name, f"{file.size:,}")


def _guarded(stage: PublishHub, ctx: Context, files: Sequence[LocalFile]) -> PublishedModel:
    """Upload; whatever goes wrong is told without the token."""
    access = None
    try:
        access = find_access(stage.token_env)
        return _upload(stage, ctx, files, access)
    except StageError:
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        ctx.log.debug("%s", masked(trace, *([access.token] if access else [])))
        retry = f"retry with: pipe resume {shlex.quote(str(ctx.run_dir))}"
        # `from None`: a traceback that shows the cause would show what is masked here.
        raise refusal(error, stage.repo, access, retry) from None


def _upload(
    stage: PublishHub, ctx: Context, files: Sequence[LocalFile], access: Access
) -> PublishedModel:
    repository = Repository(stage.repo, stage.revision, token=access.token)
    repository.create(private=stage.private)
    _require_no_other_weights(repository, files)
    additions = [CommitOperationAdd(file.name, file.path) for file in files]
    message = stage.commit_message or f"Upload the model of the run {ctx.run_dir.name}"
    commit = repository.commit(additions, message)
    _compare(repository, additions, commit.oid)
    ctx.log.info("published, and compared with the export: %s", commit.commit_url)
    return PublishedModel(repo=stage.repo, commit=commit.oid, url=str(commit.commit_url))


def _require_no_other_weights(repository: Repository, files: Sequence[LocalFile]) -> None:
    others = other_weights(repository.files(repository.branch), {file.name for file in files})
    if others:
        raise StageError(
            f"{repository.repo} ({repository.branch}) holds other weights, which would be loaded "
            f"with the model or instead of it: {', '.join(others[:10])}",
            hint="delete them there, or publish to another repository",
        )


def _compare(repository: Repository, additions: Sequence[CommitOperationAdd], commit: str) -> None:
    found = list(differences(additions, repository.files(commit)))
    if found:
        raise StageError(
            f"{repository.repo} does not hold at {commit} what was uploaded: "
            f"{'; '.join(found[:10])}",
            hint="the export is untouched; `pipe resume` uploads what differs again",
        )
