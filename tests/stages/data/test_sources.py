"""Files that patterns match, within a bound, and read again only when they may have changed; and
splits of data sets of the hub."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline import StageError
from stages.data import sources
from stages.data.sources import Source, file_problems, find_files
from tests.stages.data.conftest import Chats
from tests.stages.data.fakes import ids
from tests.support.hub import HubCache, hub_cache

__all__ = ["hub_cache"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("pattern", ["/**/*", "/**", "/**/*.jsonl"])
def test_the_whole_machine_is_not_searched(pattern: str) -> None:
    began = time.process_time()
    (problem,) = file_problems("files", pattern)
    assert problem.message == f"{pattern} looks through the whole machine"
    assert find_files(pattern) == []
    assert time.process_time() - began < 1


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_FILES", 3)
    for name in "abcd":
        (tmp_path / f"{name}.txt").touch()
    (problem,) = file_problems("files", f"{tmp_path}/**/*.txt")
    assert problem.message == f"{tmp_path}/**/*.txt matches more than 3 files"
    (tmp_path / "d.txt").unlink()
    assert not list(file_problems("files", f"{tmp_path}/**/*.txt"))


def test_matches_are_sorted_by_name_and_are_files(tmp_path: Path) -> None:
    for name in ("a/x.txt", "a-b.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to("/dev/zero")
    found = find_files(f"{tmp_path}/**/**/*.txt")
    assert not list(file_problems("files", f"{tmp_path}/**/**/*.txt"))
    assert [str(each.relative_to(tmp_path)) for each in found] == ["a-b.txt", "a.txt", "a/x.txt"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace `load_dataset` by one that accepts the right arguments only, and records them."""
    import datasets

    asked: list[Any] = []

    def load(repo: str, config: str | None, *, split: str, revision: str) -> Any:
        asked.append((repo, config, split, revision))
        if split != "train":
            raise ValueError(f"Unknown split \"{split}\". Should be one of ['train'].")
        values = [{"text": f"{letter}.", "other": None} for letter in "abc"]
        return datasets.Dataset.from_list(values)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def hub(**fields: Any) -> dict[str, Any]:
    return {"files": (), "sources": (Source(dataset="owner/name", **fields),)}


def test_rows_of_the_hub(chats: Chats, asked: list[Any]) -> None:
    given = hub(config="en", revision=COMMIT)
    assert chats.texts(**given) == ["a.", "b.", "c."]
    assert asked == [("owner/name", "en", "train", COMMIT)]
    blocks = chats.text(**given, sequence_length=3).train
    assert [blocks[i].input_ids[0] for i in range(len(blocks))] == ids("abc")


def test_a_tag_is_resolved(chats: Chats, asked: list[Any], hub_cache: HubCache) -> None:
    hub_cache.refer("dataset", "owner/name", v1="1" * 40, main="2" * 40)
    prints = [chats.run(**hub(revision=each)).fingerprint for each in ("v1", None, "1" * 40)]
    assert [revision for *_, revision in asked] == ["1" * 40, "2" * 40, "1" * 40]
    assert prints[0] == prints[2] != prints[1]


def test_mistakes_on_the_hub(chats: Chats, asked: list[Any]) -> None:
    assert chats.error(**hub(split="trian", revision=COMMIT)) == (
        'cannot get owner/name/trian from the hub: Unknown split "trian". '
        "Should be one of ['train']."
    )
    with pytest.raises(StageError, match=r"no column 'body'; it has \['text', 'other'\]"):
        chats.text(**hub(revision=COMMIT), text_key="body")
