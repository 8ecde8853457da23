"""What publishing does without a hub: dry runs, and what a check finds."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from pipeline.contracts.export import ExportedModel
from pipeline.testing import problems
from stages.publish.hub import PublishedModel, PublishHub
from tests.stages.publish.exported import REPO, TOKEN, publish, refused, snapshot


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens one or looks up a name fails."""

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
    done = publish(model, dry_run=True)
    assert done == PublishedModel(repo=REPO, commit=None, url=None)
    assert PublishedModel.restore(done.record()) == done
    assert snapshot(model.folder) == before
    listed = [record.message for record in caplog.records if record.name == "pipe.testing"]
    assert listed[0].startswith("5 file(s), 10,4")
    assert "  model.safetensors  10,240 bytes" in listed
    assert "  additional_chat_templates/tools.jinja  11 bytes" in listed
    assert len(listed) == 1 + 5 + 1
    assert "notes.txt" not in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.usefixtures("no_sockets")
@pytest.mark.parametrize(
    "card", ["---\ntags: [a\n---\n", "---\n- a\n- b\n---\n", b"---\ntags: \xff\n---\n"]
)
def test_a_card_that_the_hub_cannot_read(card: str | bytes, model: ExportedModel) -> None:
    content = card if isinstance(card, bytes) else card.encode()
    (model.folder / "README.md").write_bytes(content)
    assert "README.md: its metadata cannot be read: " in refused(model, dry_run=True)


@pytest.mark.usefixtures("no_sockets")
def test_files_that_are_gone_or_lie_elsewhere(model: ExportedModel, tmp_path: Path) -> None:
    def listing(*files: str) -> ExportedModel:
        return ExportedModel(folder=model.folder, files=files, total_bytes=0)

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
        ({"revision": "refs/pr/1"}, "revision", "must be a branch"),
        ({"revision": "a" * 40}, "revision", "must be a branch"),
        ({"revision": "not a branch"}, "revision", "cannot be the name of a branch"),
        ({"commit_message": " "}, "commit_message", "must not be empty"),
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
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert problems(PublishHub, {"repo": REPO}) == []


def test_only_rank_0_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("RANK", "1")
    assert problems(PublishHub, {"repo": REPO}) == []
    monkeypatch.setenv("RANK", "0")
    assert problems(PublishHub, {"repo": REPO})
