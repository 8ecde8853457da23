"""Publishing to a hub: what arrives is what the export lists, and the token stays out of sight."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from pipeline.contracts.export import ExportedModel
from pipeline.testing import problems
from stages.publish.hub import PublishedModel, PublishHub
from tests.stages.publish.exported import REPO, TOKEN, publish, refused
from tests.stages.publish.hub_server import Files, Hub, new_repo

# Of huggingface_hub to its own HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

UPLOADED = {
    ".gitattributes", "README.md", "additional_chat_templates/tools.jinja", "config.json",
    "export.json", "model.safetensors",
}  # fmt: skip


def test_what_the_export_lists_arrives_in_one_commit(model: ExportedModel, hub: Hub) -> None:
    done = publish(model)
    repo = hub.repos[REPO]
    assert repo.head().keys() == UPLOADED
    for name in UPLOADED - {".gitattributes"}:
        assert repo.head()[name] == (model.folder / name).read_bytes(), name
    assert repo.private
    assert repo.messages == ["Upload the model of the run run"]
    assert done.commit == repo.branches["main"]
    assert done.url == f"{hub.url}/{REPO}/commit/{done.commit}"


def test_record_and_restore_ask_nobody(model: ExportedModel, hub: Hub) -> None:
    done = publish(model)
    hub.requests.clear()
    assert PublishedModel.restore(done.record()) == done
    assert hub.requests == []
    assert TOKEN not in str(done.record())


def test_a_branch_is_made_and_main_is_left_alone(model: ExportedModel, hub: Hub) -> None:
    publish(model, revision="v2", commit_message="The second", private=False)
    repo = hub.repos[REPO]
    assert repo.head("main").keys() == {".gitattributes"}
    assert repo.head("v2").keys() == UPLOADED
    assert repo.messages == ["The second"]
    assert not repo.private


def test_publishing_again_sends_only_what_changed(model: ExportedModel, hub: Hub) -> None:
    first = publish(model)
    assert publish(model).commit == first.commit
    hub.requests.clear()
    (model.folder / "config.json").write_text('{"a": 1}\n')
    assert publish(model).commit != first.commit
    assert not [line for line in hub.requests if line.startswith("PUT")]
    assert hub.repos[REPO].head()["config.json"] == b'{"a": 1}\n'


def test_other_files_of_the_repository_stay(model: ExportedModel, hub: Hub) -> None:
    hub.repos[REPO] = new_repo(private=True, **{"eval/results.json": b"{}", "README.md": b"old"})
    publish(model)
    assert hub.repos[REPO].head().keys() == UPLOADED | {"eval/results.json"}
    assert hub.repos[REPO].head()["README.md"].startswith(b"---")


@pytest.mark.parametrize(
    "name",
    ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json"],
)
def test_a_repository_with_other_weights_is_refused(
    name: str, model: ExportedModel, hub: Hub
) -> None:
    hub.repos[REPO] = new_repo(private=True, **{name: b"other"})
    assert (
        f"holds other weights, which would be loaded with the model or instead of it: {name}"
        in (refused(model))
    )
    assert hub.repos[REPO].head().keys() == {".gitattributes", name}


def test_a_public_repository_takes_nothing_private(model: ExportedModel, hub: Hub) -> None:
    hub.repos[REPO] = new_repo(private=False)
    assert "someone/tiny is there already and is public" in refused(model)
    assert hub.repos[REPO].head().keys() == {".gitattributes"}
    assert publish(model, private=False).commit


def test_a_token_of_another_variable(
    model: ExportedModel, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ofSomebodyElseWhoMayNotWrite")
    monkeypatch.setenv("MY_HUB_TOKEN", f"{TOKEN}\n")
    assert publish(model, token_env="MY_HUB_TOKEN").commit


def test_the_login_of_the_hub(
    model: ExportedModel, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no token for the hub (set the environment variable HF_TOKEN" in refused(model)
    (tmp_path / "login").write_text(TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "login"))
    assert problems(PublishHub, {"repo": REPO}) == []
    assert publish(model).commit


REFUSALS = {
    "POST /api/repos/create": "creating",
    "GET /api/models/someone/tiny/tree": "listing",
    "/preupload/": "planning",
    "/objects/batch": "announcing",
    "PUT /lfs/": "sending",
    "/commit/": "committing",
}


@pytest.mark.parametrize("request_line", REFUSALS, ids=REFUSALS.values())
@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_is_not_enough(
    status: int, request_line: str, model: ExportedModel, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.refuse[request_line] = (status, f"Bearer {TOKEN} is not allowed to")
    text = refused(model)
    assert "cannot publish to someone/tiny: " in text
    assert str(status) in text
    assert "Bearer" not in text
    assert "is not allowed to" in text
    assert "the token in $HF_TOKEN must be valid and allow to write" in text
    assert "write access to the repositories of someone" in text
    assert f"retry with: pipe resume {model.folder.parent / 'run'}" in text
    assert TOKEN not in text + caplog.text
    assert "Traceback" in caplog.text
    assert hub.repos.get(REPO) is None or hub.repos[REPO].head().keys() == {".gitattributes"}


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed}")
    text = refused(model)
    assert "cannot publish to someone/tiny: ConnectError: " in text
    assert "refused" in text
    assert "must be valid" not in text


def lose(files: Files) -> None:
    del files["config.json"]


def shorten(files: Files) -> None:
    files["model.safetensors"] = b"short"


def flip(files: Files) -> None:
    files["model.safetensors"] = files["model.safetensors"][::-1]


def edit(files: Files) -> None:
    files["README.md"] = files["README.md"].replace(b"model", b"MODEL")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lose, "config.json is not there"),
        (shorten, "model.safetensors has 5 bytes instead of 10240"),
        (flip, "model.safetensors has another sha256"),
        (edit, "README.md has other contents"),
    ],
)
def test_what_arrived_is_compared(spoil: Any, words: str, model: ExportedModel, hub: Hub) -> None:
    hub.spoil = spoil
    text = refused(model)
    assert "someone/tiny does not hold at" in text
    assert words in text
    hub.spoil = lambda files: None
    assert publish(model).commit
    assert hub.repos[REPO].head().keys() == UPLOADED


def test_nothing_but_the_listing_is_logged_of_an_upload(
    model: ExportedModel, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="huggingface_hub")
    publish(model)
    assert f"published, and compared with the export: {hub.url}" in caplog.text
    assert TOKEN not in caplog.text
