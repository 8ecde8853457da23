"""A hub on this machine that answers in memory the requests of huggingface_hub's folder upload."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.utils.sha import git_hash

from tests.support.served import Handler, served

TOKEN = "hf_aVerySecretTokenOfThirtyFourChars"
Files = dict[str, bytes]
NAME = r"(\w[\w.-]*/[\w.-]+)"
ATTRIBUTES = {".gitattributes": b"*.safetensors filter=lfs\n"}


class Refused(Exception):
    """An answer other than 200."""


@dataclass
class Repo:
    """A repository: the files of every commit, and the commit of every branch."""

    private: bool
    commits: dict[str, Files]
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})
    messages: list[str] = field(default_factory=list)

    def at(self, revision: str = "main") -> Files:
        return self.commits[self.branches.get(revision, revision)]


def new_repo(*, private: bool, **files: bytes) -> Repo:
    """Return a repository as the hub makes it."""
    return Repo(private, {"0" * 40: ATTRIBUTES | files})


class Hub:
    """The repositories, the requests, and ways to misbehave."""

    def __init__(self) -> None:
        self.url = ""
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.refuse: dict[str, tuple[int, str]] = {}
        """Part of a request's line -> status and message."""
        self.spoil: Callable[[Files], object] = lambda files: None
        """Changes the content of a commit after it has been confirmed."""

    def answer(self, line: str, authorization: str | None, body: bytes) -> Any:
        self.requests.append(line)
        for part, answer in self.refuse.items():
            if part in line:
                raise Refused(*answer)
        if line.startswith("PUT /lfs/"):
            self.large[hashlib.sha256(body).hexdigest()] = body
            return {}
        if authorization != f"Bearer {TOKEN}":
            raise Refused(401, f"Invalid credentials: {authorization}")
        for pattern, action in ACTIONS.items():
            if match := re.fullmatch(pattern, line):
                try:
                    return action(self, *match.groups(), body)
                except KeyError as missing:
                    raise Refused(404, f"not found: {missing}") from missing
        raise Refused(501, f"not a request that publishing needs: {line}")


def _create(hub: Hub, body: bytes) -> Any:
    asked = json.loads(body)
    name = f"{asked['organization']}/{asked['name']}"
    if name in hub.repos:
        raise Refused(409, "You already created this model repo", {"url": f"{hub.url}/{name}"})
    private = asked.get("private") or asked.get("visibility") == "private"
    hub.repos[name] = new_repo(private=bool(private))
    return {"url": f"{hub.url}/{name}"}


def _info(hub: Hub, name: str, revision: str | None, body: bytes) -> Any:
    repo = hub.repos[name]
    return {"id": name, "private": repo.private, "sha": repo.branches[revision or "main"]}


def _branch(hub: Hub, name: str, branch: str, body: bytes) -> Any:
    branches = hub.repos[name].branches
    if branch in branches:
        raise Refused(409, "Reference already exists")
    branches[branch] = branches["main"]
    return {}


def _tree(hub: Hub, name: str, revision: str, body: bytes) -> Any:
    return [_entry(path, content) for path, content in hub.repos[name].at(revision).items()]


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
    digest = hashlib.sha256(content).hexdigest()
    lfs = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry | ({"lfs": lfs} if _is_large(path) else {})


def _preupload(hub: Hub, name: str, revision: str, body: bytes) -> Any:
    there = hub.repos[name].at(revision)
    files = []
    for path in (file["path"] for file in json.loads(body)["files"]):
        mode = "lfs" if _is_large(path) else "regular"
        files.append({"path": path, "shouldIgnore": False, "uploadMode": mode})
        if path in there:
            entry = _entry(path, there[path])
            files[-1]["oid"] = entry.get("lfs", entry)["oid"]
    return {"files": files}


def _batch(hub: Hub, name: str, body: bytes) -> Any:
    def action(asked: dict[str, Any]) -> dict[str, Any]:
        upload = {"upload": {"href": f"{hub.url}/lfs/{asked['oid']}"}}
        return asked if asked["oid"] in hub.large else asked | {"actions": upload}

    return {"transfer": "basic", "objects": [action(each) for each in json.loads(body)["objects"]]}


def _commit(hub: Hub, name: str, branch: str, body: bytes) -> Any:
    repo = hub.repos[name]
    files = dict(repo.at(branch))
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "header":
            repo.messages.append(value["summary"])
        else:
            large = line["key"] == "lfsFile"
            content = hub.large[value["oid"]] if large else base64.b64decode(value["content"])
            files[value["path"]] = content
    hub.spoil(files)
    oid = hashlib.sha1(body).hexdigest()
    repo.commits[oid] = files
    repo.branches[branch] = oid
    return {"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True}


ACTIONS: dict[str, Callable[..., Any]] = {
    r"POST /api/repos/create": _create,
    rf"GET /api/models/{NAME}(?:/revision/([\w.-]+))?": _info,
    rf"POST /api/models/{NAME}/branch/([\w.-]+)": _branch,
    rf"GET /api/models/{NAME}/tree/([\w.-]+)": _tree,
    r"POST /api/validate-yaml": lambda hub, body: {"errors": [], "warnings": []},
    rf"POST /api/models/{NAME}/preupload/([\w.-]+)": _preupload,
    rf"POST /{NAME}\.git/info/lfs/objects/batch": _batch,
    rf"POST /api/models/{NAME}/commit/([\w.-]+)": _commit,
}


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub on a port of this machine, at `hub.url`."""
    hub = Hub()

    class Answering(Handler):
        def do_GET(self) -> None:  # noqa: N802
            line = f"{self.command} {self.path.partition('?')[0]}"
            status, content = 200, None
            try:
                content = hub.answer(line, self.headers["Authorization"], self._body())
            except Refused as refused:
                status, message, *facts = refused.args
                content = {"error": message} | (facts[0] if facts else {})
            answer = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_PUT = do_GET  # noqa: N815

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

    with served(Answering) as hub.url:
        yield hub
