"""A hub on this machine: what huggingface_hub asks of one to upload a folder, kept in memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Files = dict[str, bytes]
LARGE = (".safetensors",)


class Refused(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, message: str, **facts: str) -> None:
        super().__init__(message)
        self.status = status
        self.content = {"error": message, **facts}


@dataclass
class Repo:
    """A repository: the files of every commit, and the commit of every branch."""

    private: bool
    commits: dict[str, Files]
    branches: dict[str, str]
    messages: list[str] = field(default_factory=list)

    def at(self, revision: str) -> Files:
        commit = self.branches.get(revision, revision)
        if commit not in self.commits:
            raise Refused(404, f"there is no revision {revision}")
        return self.commits[commit]

    def head(self, branch: str = "main") -> Files:
        return self.commits[self.branches[branch]]


def new_repo(*, private: bool, **files: bytes) -> Repo:
    """A repository as the hub makes it."""
    first = {".gitattributes": b"*.safetensors filter=lfs\n", **files}
    return Repo(private=private, commits={"0" * 40: first}, branches={"main": "0" * 40})


class Hub:
    """What the server knows, what it was asked, and how it is told to misbehave."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.url = ""
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.refuse: dict[str, tuple[int, str]] = {}
        """Part of a request's line -> status and message."""
        self.spoil: Callable[[Files], None] = lambda files: None
        """Changes what a commit holds, after it has been confirmed."""

    def answer(self, line: str, authorization: str | None, body: bytes) -> Any:
        self.requests.append(line)
        for part, (status, message) in self.refuse.items():
            if part in line:
                raise Refused(status, message)
        upload = re.fullmatch(r"PUT /lfs/(\w+)", line)
        if upload:
            assert hashlib.sha256(body).hexdigest() == upload[1]
            self.large[upload[1]] = body
            return {}
        if authorization != f"Bearer {self.token}":
            raise Refused(401, f"Invalid credentials: {authorization}")
        for pattern, action in ACTIONS.items():
            match = re.fullmatch(pattern, line)
            if match:
                return action(self, *match.groups(), body)
        raise Refused(501, f"not a request that publishing needs: {line}")

    def repo(self, name: str) -> Repo:
        if name not in self.repos:
            raise Refused(404, "Repository not found")
        return self.repos[name]


def _create(hub: Hub, body: bytes) -> Any:
    asked = json.loads(body)
    name = f"{asked['organization']}/{asked['name']}"
    if name in hub.repos:
        raise Refused(409, "You already created this model repo", url=f"{hub.url}/{name}")
    private = asked.get("private") or asked.get("visibility") == "private"
    hub.repos[name] = new_repo(private=bool(private))
    return {"url": f"{hub.url}/{name}"}


def _info(hub: Hub, name: str, revision: str | None, body: bytes) -> Any:
    repo = hub.repo(name)
    return {"id": name, "private": repo.private, "sha": repo.branches[revision or "main"]}


def _branch(hub: Hub, name: str, branch: str, body: bytes) -> Any:
    branches = hub.repo(name).branches
    if branch in branches:
        raise Refused(409, "Reference already exists")
    branches[branch] = branches["main"]
    return {}


def _tree(hub: Hub, name: str, revision: str, body: bytes) -> Any:
    return [_entry(path, content) for path, content in hub.repo(name).at(revision).items()]


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": _git_hash(content)}
    if path.endswith(LARGE):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _validate(hub: Hub, body: bytes) -> Any:
    return {"errors": [], "warnings": []}


def _preupload(hub: Hub, name: str, revision: str, body: bytes) -> Any:
    there = hub.repo(name).at(revision)
    return {"files": [_mode(file["path"], there) for file in json.loads(body)["files"]]}


def _mode(path: str, there: Files) -> dict[str, Any]:
    mode = {"path": path, "shouldIgnore": False, "uploadMode": "regular"}
    if path.endswith(LARGE):
        mode["uploadMode"] = "lfs"
    if path in there:
        content = there[path]
        large = path.endswith(LARGE)
        mode["oid"] = hashlib.sha256(content).hexdigest() if large else _git_hash(content)
    return mode


def _batch(hub: Hub, name: str, body: bytes) -> Any:
    def action(asked: dict[str, Any]) -> dict[str, Any]:
        upload = {"upload": {"href": f"{hub.url}/lfs/{asked['oid']}"}}
        return asked if asked["oid"] in hub.large else asked | {"actions": upload}

    return {"transfer": "basic", "objects": [action(each) for each in json.loads(body)["objects"]]}


def _commit(hub: Hub, name: str, branch: str, body: bytes) -> Any:
    repo = hub.repo(name)
    files = dict(repo.head(branch))
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "header":
            repo.messages.append(value["summary"])
        elif line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        else:
            assert line["key"] == "lfsFile"
            files[value["path"]] = hub.large[value["oid"]]
    hub.spoil(files)
    oid = hashlib.sha1(body).hexdigest()
    repo.commits[oid] = files
    repo.branches[branch] = oid
    return {"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True}


NAME = r"(\w[\w.-]*/[\w.-]+)"
ACTIONS: dict[str, Callable[..., Any]] = {
    r"POST /api/repos/create": _create,
    rf"GET /api/models/{NAME}": lambda hub, name, body: _info(hub, name, None, body),
    rf"GET /api/models/{NAME}/revision/([\w.-]+)": _info,
    rf"POST /api/models/{NAME}/branch/([\w.-]+)": _branch,
    rf"GET /api/models/{NAME}/tree/([\w.-]+)": _tree,
    r"POST /api/validate-yaml": _validate,
    rf"POST /api/models/{NAME}/preupload/([\w.-]+)": _preupload,
    rf"POST /{NAME}\.git/info/lfs/objects/batch": _batch,
    rf"POST /api/models/{NAME}/commit/([\w.-]+)": _commit,
}


class Handler(BaseHTTPRequestHandler):
    """HTTP around `Hub.answer`."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        line = f"{self.command} {self.path.partition('?')[0]}"
        status, content = 200, None
        try:
            content = self.hub.answer(line, self.headers["Authorization"], self._body())
        except Refused as refused:
            status, content = refused.status, refused.content
        answer = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
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

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub behind a port of this machine, at `hub.url`."""
    handler = type("HubHandler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
