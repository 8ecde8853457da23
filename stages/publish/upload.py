"""Publish an export: list, check, upload, compare. Rank 0 works, the others wait."""

from __future__ import annotations

import hashlib
import json
import shlex
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.hf_api import RepoFile

from pipeline.contracts.export import ExportedModel
from pipeline.errors import StageError
from stages.publish.hub import PublishedModel
from stages.publish.token import Access, find_access, masked, refusal

if TYPE_CHECKING:
    from pipeline.contracts.stage import Context
    from stages.publish.hub import PublishHub


def publish(stage: PublishHub, ctx: Context, model: ExportedModel) -> PublishedModel:
    """Upload on rank 0; every rank returns the same record."""
    record = None
    if ctx.dist.is_main:
        record = json.dumps(_publish(stage, ctx, model).record())
    return PublishedModel.restore(json.loads(ctx.dist.broadcast_str(record)))


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


def other_weights(there: Iterable[str], ours: Collection[str]) -> list[str]:
    """Files at the top of the repository that loaders would mix with the model or take instead of
    it: shards of another size, an index, an adapter."""
    return sorted(name for name in there if name not in ours and _is_loaded(name))


def _is_loaded(name: str) -> bool:
    ending = (".safetensors", ".safetensors.index.json")
    return name == "adapter_config.json" or ("/" not in name and name.endswith(ending))


def differences(
    additions: Iterable[CommitOperationAdd], there: Mapping[str, RepoFile]
) -> Iterator[str]:
    """In what the repository's files are not those that were uploaded, in words."""
    for addition in additions:
        name = addition.path_in_repo
        if name not in there:
            yield f"{name} is not there"
        else:
            yield from _difference(addition, there[name])


def _difference(addition: CommitOperationAdd, remote: RepoFile) -> Iterator[str]:
    name, size = addition.path_in_repo, addition.upload_info.size
    if remote.size != size:
        yield f"{name} has {remote.size} bytes instead of {size}"
    elif remote.lfs is not None:
        if remote.lfs.sha256 != addition.upload_info.sha256.hex():
            yield f"{name} has another sha256"
    elif remote.blob_id != _git_hash(Path(str(addition.path_or_fileobj))):
        yield f"{name} has other contents"


def _git_hash(path: Path) -> str:
    """Git's name for a file that is stored as it is; those are small."""
    content = path.read_bytes()
    header = f"blob {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A file of the export, with its name in the repository."""

    name: str
    path: Path
    size: int


def contents(model: ExportedModel) -> list[LocalFile]:
    """The files of the export, by name. Raises StageError when one is gone or lies elsewhere."""
    found = {file.name: file for listed in model.files for file in _files(model.folder, listed)}
    if not found:
        raise StageError(f"the export in {model.folder} lists no files")
    return [found[name] for name in sorted(found)]


def _files(folder: Path, listed: str) -> Iterator[LocalFile]:
    """The listed file; of a listed folder all that is in it."""
    place = folder / listed
    inside = place.rglob("*") if place.is_dir() else [place]
    for path in inside:
        if not path.is_dir():
            yield _file(folder, path)


def _file(folder: Path, path: Path) -> LocalFile:
    if not path.is_file():
        raise StageError(
            f"a file of the export is gone: {path}", hint="export again, into another folder"
        )
    if not path.resolve().is_relative_to(folder.resolve()):
        raise StageError(f"a file that the export lists is not in its folder: {path}")
    return LocalFile(name=path.relative_to(folder).as_posix(), path=path, size=path.stat().st_size)


CARD = "README.md"


def check_card(files: Iterable[LocalFile]) -> None:
    """Raise StageError when the card, if there is one, has metadata that cannot be read."""
    for file in files:
        if file.name == CARD:
            _check(file)


def _check(file: LocalFile) -> None:
    try:
        ModelCard.load(file.path).data.to_yaml()
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise StageError(f"{file.path}: its metadata cannot be read: {reason}") from error
