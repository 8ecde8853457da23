"""Publishing to a hub: exactly the files that the export lists arrive, and the token is never
shown."""

from __future__ import annotations

import dataclasses
import itertools
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from pipeline.contracts.export import ExportedModel
from pipeline.distributed.process_group import DistContext
from pipeline.testing import context, problems
from stages.publish.hub import PublishedModel, PublishHub
from tests.stages.publish.conftest import LISTED, REPO, publish, refused, snapshot
from tests.stages.publish.hub_server import ATTRIBUTES, TOKEN, Hub, new_repo, serving
from tests.support.pipe import Outcome, Pipe
from tests.support.plugins import install
from tests.support.ports import free_port
from tests.support.processes import run_ranks
from tests.support.tier import FULL

# huggingface_hub calls its own HTTP library in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

UPLOADED = {
    "README.md", "additional_chat_templates/tools.jinja", "config.json", "export.json",
    "model.safetensors",
}  # fmt: skip


def test_what_the_export_lists_arrives_in_one_commit(
    model: ExportedModel, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    done = publish(model)
    repo = hub.repos[REPO]
    sent = {name: (model.folder / name).read_bytes() for name in UPLOADED}
    assert repo.at() == ATTRIBUTES | sent
    assert repo.private
    assert repo.messages == ["Upload the model of the run run"]
    assert done.commit == repo.branches["main"]
    assert done.url == f"{hub.url}/{REPO}/commit/{done.commit}"
    assert f"published, and compared with the export: {done.url}" in caplog.text
    assert TOKEN not in caplog.text + str(done.record())
    hub.requests.clear()
    assert PublishedModel.restore(done.record()) == done
    assert hub.requests == []


def test_a_branch_is_made_and_main_is_left_alone(model: ExportedModel, hub: Hub) -> None:
    publish(model, revision="v2", commit_message="The second", private=False)
    repo = hub.repos[REPO]
    assert repo.at("main") == ATTRIBUTES
    assert repo.at("v2").keys() == UPLOADED | ATTRIBUTES.keys()
    assert repo.messages == ["The second"]
    assert not repo.private


def test_publishing_again_sends_only_what_changed(model: ExportedModel, hub: Hub) -> None:
    hub.repos[REPO] = new_repo(private=True, **{"eval/results.json": b"{}", "README.md": b"old"})
    first = publish(model)
    assert hub.repos[REPO].at().keys() == UPLOADED | ATTRIBUTES.keys() | {"eval/results.json"}
    assert hub.repos[REPO].at()["README.md"].startswith(b"---")
    assert publish(model).commit == first.commit
    hub.requests.clear()
    (model.folder / "config.json").write_text('{"a": 1}\n')
    assert publish(model).commit != first.commit
    assert not [line for line in hub.requests if line.startswith("PUT")]
    assert hub.repos[REPO].at()["config.json"] == b'{"a": 1}\n'


@pytest.mark.parametrize(
    "name",
    ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json"],
)
def test_a_repository_with_other_weights_is_refused(
    name: str, model: ExportedModel, hub: Hub
) -> None:
    hub.repos[REPO] = new_repo(private=True, **{name: b"other"})
    message = "holds other weights, which would be loaded with the model or instead of it: "
    assert message + name in refused(model)
    assert hub.repos[REPO].at() == ATTRIBUTES | {name: b"other"}


def test_a_public_repository_takes_nothing_private(model: ExportedModel, hub: Hub) -> None:
    hub.repos[REPO] = new_repo(private=False)
    assert "someone/tiny is there already and is public" in refused(model)
    assert hub.repos[REPO].at() == ATTRIBUTES
    assert publish(model, private=False).commit


def test_tokens_of_another_variable_and_of_the_login(
    model: ExportedModel, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ofSomebodyElseWhoMayNotWrite")
    monkeypatch.setenv("MY_HUB_TOKEN", f"{TOKEN}\n")
    assert publish(model, token_env="MY_HUB_TOKEN").commit
    monkeypatch.delenv("HF_TOKEN")
    assert "no token for the hub (set the environment variable HF_TOKEN" in refused(model)
    (tmp_path / "login").write_text(TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "login"))
    assert problems(PublishHub, {"repo": REPO}) == []
    assert publish(model).commit


REQUESTS = ["POST /api/repos/create", "GET /api/models/someone/tiny/tree", "/preupload/",
            "/objects/batch", "PUT /lfs/", "/commit/"]  # fmt: skip
REFUSALS = itertools.product(REQUESTS, (401, 403))
if not FULL:
    REFUSALS = zip(REQUESTS, itertools.cycle((401, 403)))


@pytest.mark.parametrize(("request_line", "status"), [*REFUSALS])
def test_a_token_that_is_not_enough(
    request_line: str, status: int, model: ExportedModel, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.refuse[request_line] = (status, f"Bearer {TOKEN} is not allowed to")
    text = refused(model)
    assert "cannot publish to someone/tiny: " in text
    assert str(status) in text
    assert "Bearer" not in text
    assert "is not allowed to" in text
    assert "the token must be valid and allow to write to the repositories of someone" in text
    assert "it comes from $HF_TOKEN" in text
    assert f"retry with: pipe resume {model.folder.parent / 'run'}" in text
    assert TOKEN not in text + caplog.text
    assert "Traceback" in caplog.text
    assert hub.repos.get(REPO) is None or hub.repos[REPO].at() == ATTRIBUTES


def test_a_token_of_another_form_is_masked_too(
    model: ExportedModel,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "unusual+token")
    hub.refuse["POST /api/repos/create"] = (401, "there is no user of unusual+token")
    text = refused(model)
    assert "there is no user of <token>" in text
    assert "unusual+token" not in text + caplog.text


def test_an_error_of_the_server_can_be_retried(model: ExportedModel, hub: Hub) -> None:
    hub.refuse["/commit/"] = (500, "out of order")
    text = refused(model)
    assert "out of order" in text
    assert "the export is untouched; retry with: pipe resume" in text
    assert "must be valid" not in text
    hub.refuse.clear()
    hub.requests.clear()
    assert publish(model).commit
    assert not [line for line in hub.requests if line.startswith("PUT")]


def test_no_network(model: ExportedModel, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    text = refused(model)
    assert "cannot publish to someone/tiny: ConnectError: " in text
    assert "must be valid" not in text


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda files: files.pop("config.json"), "config.json is not there"),
        (lambda files: files.update({"model.safetensors": b"short"}),
         "model.safetensors has 5 bytes instead of 10240"),
        (lambda files: files.update({"model.safetensors": bytes(10240)}),
         "model.safetensors has another sha256"),
        (lambda files: files.update({"README.md": bytes(len(files["README.md"]))}),
         "README.md has other contents"),
    ],
)  # fmt: skip
def test_what_arrived_is_compared(spoil: Any, words: str, model: ExportedModel, hub: Hub) -> None:
    hub.spoil = spoil
    text = refused(model)
    assert "someone/tiny does not hold at" in text
    assert words in text
    hub.spoil = lambda files: None
    assert publish(model).commit
    assert hub.repos[REPO].at().keys() == UPLOADED | ATTRIBUTES.keys()


# Without a hub.


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every opened socket and every look-up of a name fail."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a dry run reached for the network")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.mark.usefixtures("no_sockets")
def test_a_dry_run_lists_and_opens_no_socket(
    model: ExportedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    before = snapshot(model.folder)
    assert publish(model, dry_run=True) == PublishedModel(repo=REPO, commit=None, url=None)
    assert snapshot(model.folder) == before
    listed = [record.message for record in caplog.records if record.name == "pipe.testing"]
    assert listed[0] == f"5 files, 10.4 KB, for {REPO}:"
    lines = [line.split() for line in listed]
    assert ["model.safetensors", "10.2", "KB"] in lines
    assert ["additional_chat_templates/tools.jinja", "11", "B"] in lines
    assert len(listed) == 1 + 5 + 1
    assert TOKEN not in caplog.text


@pytest.mark.usefixtures("no_sockets")
@pytest.mark.parametrize("card", [b"---\ntags: [a\n---\n", b"---\n- a\n- b\n---\n", b"---\n\xff\n"])
def test_a_card_that_the_hub_cannot_read(card: bytes, model: ExportedModel) -> None:
    (model.folder / "README.md").write_bytes(card)
    assert "README.md: its metadata cannot be read: " in refused(model, dry_run=True)


@pytest.mark.usefixtures("no_sockets")
def test_files_that_are_gone_or_lie_elsewhere(model: ExportedModel, tmp_path: Path) -> None:
    def listing(*files: str) -> ExportedModel:
        return dataclasses.replace(model, files=files)

    (tmp_path / "outside.txt").write_text("secret")
    (model.folder / "link").symlink_to(tmp_path / "outside.txt")
    assert "a file of the export is gone: " in refused(listing("gone.json"), dry_run=True)
    for name in ("../outside.txt", str(tmp_path / "outside.txt"), "link"):
        assert "is not in its folder" in refused(listing(name), dry_run=True)
    assert "lists no files" in refused(listing(), dry_run=True)


@pytest.mark.parametrize(
    ("fields", "key", "words"),
    [
        ({"repo": "tiny"}, "repo", "must be owner/name"),
        ({"repo": "a/b/c"}, "repo", "must be owner/name"),
        ({"repo": "a/b--c"}, "repo", "Cannot have -- or .."),
        ({"revision": "refs/pr/1"}, "revision", "must be the name of a branch"),
        ({"revision": "a" * 40}, "revision", "must be the name of a branch"),
        ({"revision": "not a branch"}, "revision", "must be the name of a branch"),
        ({"token_env": "MY-TOKEN"}, "token_env", "must be the name of an environment variable"),
        ({"token_env": TOKEN}, "token_env", "not the token itself"),
    ],
)
def test_mistakes(fields: dict[str, Any], key: str, words: str) -> None:
    [problem] = problems(PublishHub, {"repo": REPO, "dry_run": True} | fields)
    assert problem.key == key
    assert words in problem.message
    assert TOKEN not in str(problem)


def test_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline, missing = problems(PublishHub, {"repo": REPO})
    assert "HF_HUB_OFFLINE" in offline.message
    assert missing.key == "token_env"
    assert "set the environment variable HF_TOKEN" in missing.hint
    assert problems(PublishHub, {"repo": REPO, "dry_run": True}) == []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    assert problems(PublishHub, {"repo": REPO}) == []  # only rank 0 uses the hub


def publish_on_rank(dist: DistContext, folder: str) -> dict[str, object]:
    ctx = dataclasses.replace(context(Path(folder).parent / "run"), dist=dist)
    path = Path(folder) if dist.is_main else Path("not on this machine")
    model = ExportedModel(folder=path, files=LISTED, total_bytes=10240)
    return PublishHub(repo=REPO, dry_run=True).run(ctx, model).record()


def test_ranks_agree_and_only_rank_0_looks(model: ExportedModel) -> None:
    first, second = run_ranks(publish_on_rank, 2, str(model.folder))
    assert first == second == {"repo": REPO, "commit": None, "url": None}


# `pipe` with a hub.


READY = """
    import json
    from dataclasses import dataclass
    from pathlib import Path
    from pipeline.contracts.export import ExportedModel
    from pipeline.contracts.stage import Context

    @dataclass(frozen=True, kw_only=True)
    class Ready:
        '''Give a folder that was exported before.'''

        folder: str
        '''The folder.'''

        def run(self, ctx: Context) -> ExportedModel:
            folder = Path(self.folder)
            files = json.loads((folder / "export.json").read_text())["files"]
            return ExportedModel(folder=folder, files=files, total_bytes=10240)
"""


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    install(plugin, "ready", "ready", READY, {"export.ready": "Ready"})
    pipe = Pipe(plugin, tmp_path)
    for name in [name for name in pipe.environment if name.startswith(("HF_", "TRANSFORMERS_"))]:
        del pipe.environment[name]
    yield pipe
    assert pipe.processes() == []


def write_recipe(pipe: Pipe, folder: Path) -> Path:
    stages = {
        "export": {"use": "export.ready", "folder": str(folder)},
        "publish": {"use": "publish.hub", "repo": REPO},
    }
    launch = {"procs": 2, "device": "cpu"}
    path = pipe.folder / "recipe.yaml"
    path.write_text(json.dumps({"name": "tiny", "launch": launch, "stages": stages}))
    return path


def test_an_upload_is_retried_and_then_not_made_again(pipe: Pipe, model: ExportedModel) -> None:
    """Each process imports huggingface_hub under the settings of this test."""
    recipe = write_recipe(pipe, model.folder)

    def anew(*arguments: str) -> Outcome:
        return pipe.end(pipe.start("-m", "pipetrain", *arguments))

    with serving() as hub:
        pipe.environment |= {
            "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(pipe.folder / "home"),
        }  # fmt: skip
        hub.refuse["/commit/"] = (403, f"{TOKEN} may not")
        failed = anew("run", str(recipe), "--run-dir", str(pipe.run_dir))
        assert failed.code == 1
        assert "the token must be valid and allow to write" in failed.stderr
        hub.refuse.clear()
        resumed = anew("resume", str(pipe.run_dir))
        assert resumed.code == 0, resumed.stderr
        assert len(hub.repos[REPO].commits) == 2
        hub.requests.clear()
        again = anew("resume", str(pipe.run_dir))
        assert again.code == 0, again.stderr
        assert hub.requests == []
    said = "".join(each.stdout + each.stderr for each in (failed, resumed, again))
    written = [path for path in pipe.run_dir.rglob("*") if path.is_file()]
    assert TOKEN not in said
    assert {"journal.jsonl", "rank-00000.log"} <= {path.name for path in written}
    assert [path for path in written if TOKEN.encode() in path.read_bytes()] == []
    [record] = [
        event["record"]
        for event in pipe.events()
        if event["event"] == "slot finished" and event["slot"] == "publish"
    ]
    assert record["commit"] == hub.repos[REPO].branches["main"]
