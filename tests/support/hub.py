"""A hub to read from: a server on this machine, and a cache of the hub as a download leaves it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from pipeline.utils import hub
from tests.support.served import Handler, served

FIRST, SECOND = "1" * 40, "2" * 40
"""Commits."""
PLURALS = {"model": "models", "dataset": "datasets"}


@dataclass
class Repository:
    """The files of every commit, all in one folder, and the commit of every branch and tag."""

    folder: Path | None
    refs: dict[str, str]


@dataclass
class HubServer:
    """Its address, its repositories by kind and name, and the requests that it has answered."""

    url: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    status: int | None = None
    """Answer to all requests."""

    def add(self, name: str, folder: Path | None = None, kind: str = "model", **refs: str) -> None:
        """Add a repository, whose refs are names of branches and tags."""
        self.repositories[PLURALS[kind], name] = Repository(folder, refs or {"main": FIRST})

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables with which another process asks this hub, and keeps files in `cache`."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}

    def answer(self, line: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content of the answer to a request."""
        self.requests.append(line)
        if self.status is not None:
            return self.status, {}, b"{}"
        path = line.partition(" ")[2]
        api = re.fullmatch(r"/api/(\w+)/([\w.-]+/[\w.-]+?)(?:/(revision|tree)/([^/]+))?/?", path)
        if api:
            kind, name, what, revision = api.groups()
            repository = self.repositories.get((kind, name))
            if repository is None:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            commits = repository.refs.values()
            commit = repository.refs.get(revision or "main", revision)
            if commit not in commits:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            files = sorted(repository.folder.iterdir()) if repository.folder else []
            if what == "tree":
                return 200, {}, json.dumps([_entry(file) for file in files]).encode()
            names = [{"rfilename": file.name} for file in files]
            return 200, {}, json.dumps({"id": name, "sha": commit, "siblings": names}).encode()
        file = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/(\w+)/([\w.-]+)", path)
        if file:
            repository = self.repositories["models", file[1]]
            assert repository.folder is not None
            place = repository.folder / file[3]
            if not place.is_file():
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            headers = {"ETag": f'"{_digest(place)}"', "X-Repo-Commit": file[2]}
            return 200, headers, place.read_bytes()
        return 501, {}, b"{}"


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def _entry(file: Path) -> dict[str, Any]:
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _digest(file)}


@contextlib.contextmanager
def serving() -> Iterator[HubServer]:
    """Serve a hub on a port of this machine, at `url`."""
    hub = HubServer()

    class Answering(Handler):
        def do_GET(self) -> None:  # noqa: N802
            line = f"{self.command} {self.path.partition('?')[0]}"
            status, headers, content = hub.answer(line)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815

    with served(Answering) as hub.url:
        yield hub


@dataclass(frozen=True)
class HubCache:
    """The hub's cache of this process."""

    folder: Path

    def refer(self, kind: str, name: str, **refs: str) -> Path:
        """Set branches and tags of a repository; return its folder."""
        place = self.folder / f"{PLURALS[kind]}--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True, exist_ok=True)
        for ref, commit in refs.items():
            (place / "refs" / ref).write_text(commit)
        return place

    def add(self, name: str, commit: str, files: Path, **refs: str) -> Path:
        """Add a model's snapshot at a commit; return its folder."""
        snapshot = self.refer("model", name, **refs) / "snapshots" / commit
        shutil.copytree(files, snapshot)
        return snapshot


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    """Return an empty cache, which this process and those that it starts use offline."""
    place = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(place))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub._asked.cache_clear()
    hub._silent.clear()
    return HubCache(place)


@pytest.fixture
def hub_server(hub_cache: HubCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve a hub that this process and those that it starts ask; its cache is empty."""
    with serving() as served:
        for name, value in served.environment(hub_cache.folder).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served
