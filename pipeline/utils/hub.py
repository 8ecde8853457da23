"""Models and data sets of the Hugging Face hub by name, the commits that the names stand for, and
addresses such as `s3://bucket/folder`: the only door to fsspec.

A recipe may name a model without a commit. The commit is asked of the hub once a command, said, and
kept with the run. Where the hub cannot be asked, its cache on this machine answers.

fsspec opens far more than stores. Its chains (`simplecache::s3://...`) and protocols such as
`reference`, `github` or `jupyter` read files that name other files, fetch from anywhere, and have
run code that stood in what they read. So what a recipe or a command can name is listed here."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from pipeline.errors import Problem, StageError, UsageError
from pipeline.utils import terminal

COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"
PINNED = "PIPE_PINNED"
"""Environment variable that `--pinned` sets: refuse what names no commit."""
TOO_MANY, BROKEN = 429, 500
"""HTTP status of a hub that is asked too often, and the first status that is a failure."""
SECONDS = 10.0
"""Limit of the hub's answer."""
AGAIN = 60.0
"""Seconds in which a hub that has not answered is not asked again: a recipe's stages, planner and
start all ask, for each name."""


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A model or data set of the hub that fields of a stage name."""

    kind: Literal["model", "dataset"]
    repo: str
    """`owner/name`."""
    revision: str | None
    """Commit, branch or tag; None for the main branch."""
    named_by: str
    """Field with the name, as in `path` or `sources.0.dataset`."""
    key: str
    """Field with the revision."""

    @property
    def pinned(self) -> bool:
        """Whether it names a commit."""
        return bool(COMMIT.fullmatch(self.revision or ""))

    @property
    def asked(self) -> tuple[str, str, str]:
        """Its kind, name, and branch or tag."""
        return self.kind, self.repo, self.revision or MAIN

    def __str__(self) -> str:
        return f"{'data set' if self.kind == 'dataset' else self.kind}: {self.repo}"

    def record(self, commit: str) -> dict[str, str]:
        """The name and its commit, as the journal of a run keeps them."""
        kind, repo, branch = self.asked
        return {"kind": kind, "repo": repo, "revision": branch, "commit": commit}


Known = Mapping[tuple[str, str, str], str]
"""`HubName.asked` -> the commit that an earlier start of a run has found."""


def commit_of(name: HubName, known: Known | None = None) -> str:
    """The commit that a name stands for, said on stderr; a name's own commit without a word. Raises
    StageError, which says what to do, if neither `known`, the hub nor its cache has one."""
    if name.pinned:
        assert name.revision is not None
        return name.revision
    before = (known or {}).get(name.asked)
    if before is not None:
        _say(name, before, ", as when this run began")
        return before
    return _asked(replace(name, named_by="", key=""))


_silent: dict[str, tuple[float, str]] = {}
"""Address of a hub that does not answer -> until when it is not asked again, and why."""


@functools.cache
def _asked(name: HubName) -> str:
    """Ask the hub once a process, or else its cache."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    kind, repo, branch = name.asked
    until, why = _silent.get(constants.ENDPOINT, (0.0, ""))
    if constants.HF_HUB_OFFLINE or time.monotonic() < until:
        return _cached(name, "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else why)
    try:
        found = HfApi().repo_info(repo, repo_type=kind, revision=branch, timeout=SECONDS).sha
    except RevisionNotFoundError as error:
        hint = "set `revision` to one that its page lists, or leave it out for main"
        raise StageError(f"{repo} has no branch, tag or commit `{branch}`", hint=hint) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        hint = "mind its spelling; for a private one log in (`hf auth login`) or set HF_TOKEN"
        raise StageError(f"{repo}: the hub shows no such {kind}", hint=hint) from error
    except Exception as error:  # of the network, whose library changes with the hub's client
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        how = f"answers {status}" if status else f"cannot be reached, {type(error).__name__}"
        why = f"{constants.ENDPOINT} {how}"
        if status is None or status == TOO_MANY or status >= BROKEN:
            _silent[constants.ENDPOINT] = time.monotonic() + AGAIN, why
        return _cached(name, why)
    if not found:
        raise StageError(f"{repo}: the hub does not say the commit of {branch}")
    _say(name, found)
    return found


def _cached(name: HubName, why: str) -> str:
    """The commit of the hub's cache: of the branch as it was downloaded, or the only one."""
    from huggingface_hub import constants

    kind, repo, branch = name.asked
    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{repo.replace('/', '--')}"
    ref = folder / "refs" / branch
    commit = ref.read_text("utf-8").strip() if ref.is_file() else ""
    if COMMIT.fullmatch(commit):
        _say(name, commit, f" in this machine's cache ({why})")
        return commit
    there = [one.name for one in (folder / "snapshots").glob("*") if COMMIT.fullmatch(one.name)]
    if len(there) == 1 and name.revision is None:
        _say(name, there[0], f", the only commit in this machine's cache ({why})")
        return there[0]
    hint = f"set `revision` to one of these: {', '.join(sorted(there))}"
    if not there:
        own = repo.rpartition("/")[2]
        option, extra, then = "", " (for a plan config.json is enough)", f"set model.path=./{own}"
        if kind == "dataset":
            option, extra, then = " --repo-type dataset", "", "name its files by their path"
        hint = (
            f"`hf download {repo}{option} --local-dir {own}` where there is a network{extra}, copy "
            f"the folder here, and {then}"
        )
    missing = f"{repo}: this machine's cache {folder} has no commit of {branch}, and {why}"
    raise StageError(missing, hint=hint)


def _say(name: HubName, commit: str, how: str = "") -> None:
    if "quiet" not in terminal.shows:
        click.echo(f"{name} is {name.revision or MAIN} at {commit}{how}", err=True)


def pins_asked() -> bool:
    """Whether names without a commit are refused."""
    return os.environ.get(PINNED) == "1"


def recorded(entries: Any) -> dict[tuple[str, str, str], str]:
    """The commits that `HubName.record` has written; what is damaged is left out."""
    found = {}
    for one in entries if isinstance(entries, list) else ():
        if isinstance(one, Mapping) and COMMIT.fullmatch(str(one.get("commit"))):
            place = (str(one.get("kind")), str(one.get("repo")), str(one.get("revision")))
            found[place] = str(one["commit"])
    return found


PROTOCOLS = (
    "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hdfs", "hf", "http", "https",
    "file", "memory",
)  # fmt: skip
"""Protocols that an address can have: object stores, HDFS, the Hugging Face hub, web servers, local
files, and the memory of one process, which is for tests."""


def open_address(address: str, **options: Any) -> tuple[Any, str]:
    """The file system of an address, made with fsspec's `options`, and the place there. Raises
    UsageError for an address that `address_problems` refuses, and what the store's library raises.
    """
    for problem in address_problems("", address):
        raise UsageError(problem.message, hint=problem.hint)
    from fsspec.core import url_to_fs

    system, place = url_to_fs(address, **options)
    return system, str(place)


def address_problems(key: str, text: str | None) -> Iterator[Problem]:
    """The mistake of an address under `key`, without opening it; none for a path."""
    protocol, mark, rest = (text or "").partition("://")
    if not mark:
        protocol, mark, rest = (text or "").partition(":/")
        if mark and protocol in PROTOCOLS:
            meant = f"did you mean {protocol}://{rest.lstrip('/')}?"
            yield Problem(key=key, message=f"{text}: one slash is missing", hint=meant)
        return
    if "::" in protocol or "::" in rest:
        hint = "give the address of the files themselves"
        yield Problem(key=key, message=f"{text}: a chain of file systems is not opened", hint=hint)
    elif protocol not in PROTOCOLS:
        known = ", ".join(f"{each}://" for each in PROTOCOLS)
        lower = protocol.lower()
        hint = f"did you mean {lower}://{rest}?" if lower in PROTOCOLS else f"known: {known}"
        yield Problem(key=key, message=f"{protocol}:// is not opened", hint=hint)
    else:
        from fsspec.registry import known_implementations

        store = known_implementations.get(protocol)
        if store and importlib.util.find_spec(store["class"].partition(".")[0]) is None:
            message = f"{protocol}:// needs a package"
            yield Problem(key=key, message=message, hint=store.get("err", ""))


def path_problems(key: str, text: str | None) -> Iterator[Problem]:
    """The mistake of an address under `key`, where only a path of this machine can stand."""
    protocol, mark, rest = (text or "").partition(":/")
    if mark and (protocol in PROTOCOLS or rest.startswith("/")):
        hint = "give a path; what is written there can be copied to the store afterwards"
        yield Problem(key=key, message=f"{text} is an address, not a path", hint=hint)
