"""Memory to read files into, and files to write to."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.location import address
from pipeline.utils.files import (
    check_writable,
    expanded,
    opened,
    page_aligned,
    private_folder,
    remove_folder,
    replace_text,
)


def test_only_homes_that_there_are_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/x") == Path("/home/me/x")
    assert expanded("~nobody-here/x") == Path("~nobody-here/x")
    saved = address(Path("/runs/r"), "~nobody-here")
    assert saved == str(Path.cwd() / "~nobody-here/r")


def test_memory_begins_with_a_page() -> None:
    memory = page_aligned(100_001)
    assert len(memory) == 100_001
    assert torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % mmap.PAGESIZE == 0
    assert len(page_aligned(0)) == 0


def test_memory_is_not_shared_with_forked_processes() -> None:
    """Two readers of one buffer would each find the other's bytes in it."""
    memory = page_aligned(100_001)
    assert permissions(torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) == "rw-p"


def test_trying_to_write_leaves_nothing_and_what_there_is(tmp_path: Path) -> None:
    check_writable(tmp_path / "new")
    (tmp_path / "link").symlink_to("new")
    check_writable(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"
    os.mkfifo(tmp_path / "pipe")
    check_writable(tmp_path / "pipe")  # waits for no reader
    with pytest.raises(FileNotFoundError):
        check_writable(tmp_path / "none/new")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("kept")
    link.symlink_to(target)
    for mode in ("w", "a", "ab+", "r+b"):
        with pytest.raises(OSError, match=r"is a link, and nothing is written through links.*link"):
            opened(link, mode)
    with pytest.raises(OSError, match="is a link"):
        private_folder(link)
    (tmp_path / "link.tmp").symlink_to(target)
    replace_text(link, "new")
    assert target.read_text() == "kept"
    assert (link.read_text(), link.is_symlink()) == ("new", False)


def test_a_folder_is_removed_and_anything_else_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("kept")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    os.mkfifo(tmp_path / "folder" / "inner" / "pipe")
    for name in ("file", "link", "pipe", "folder", "absent"):
        remove_folder(tmp_path / name)  # waits for no writer of a pipe
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"file", "kept", "link", "pipe"}


def test_new_files_are_their_owners(tmp_path: Path) -> None:
    replace_text(tmp_path / "replaced", "")
    opened(tmp_path / "appended", "a").close()
    private_folder(tmp_path / "folder")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"replaced": 0o600, "appended": 0o600, "folder": 0o700}


def permissions(address: int) -> str:
    """Return the permissions of the mapping that holds the address: proc_pid_maps(5)."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        span, found = line.split()[:2]
        first, last = (int(edge, 16) for edge in span.split("-"))
        if first <= address < last:
            return found
    raise AssertionError("nothing is mapped there")
