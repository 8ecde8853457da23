"""Who may read a run's folder, and whose folder is used."""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

import pytest

from tests.support.pipe import Pipe
from tests.support.tier import FULL
from tests.support.tiny_recipe import training, write


def modes(run: Path) -> dict[str, set[str]]:
    """Return the permissions of files and of folders, without exports."""
    found: dict[str, set[str]] = {"file": set(), "folder": {oct(stat.S_IMODE(run.stat().st_mode))}}
    for path in run.rglob("*"):
        kind = "folder" if path.is_dir() else "file"
        found[kind].add(oct(stat.S_IMODE(path.stat().st_mode)))
    return found


# Forked processes do not take the umask from here.
@pytest.mark.parametrize("umask", [0o022, 0o077] if FULL else [0o022])
def test_a_run_is_its_owners_unless_it_is_opened_to_a_group(pipe: Pipe, umask: int) -> None:
    stages = training(checkpoint={"every": 2}, train={"steps": 2})
    recipe = write(pipe.folder / "recipe.yaml", stages, procs=2)
    before = os.umask(umask)
    try:
        command = ("run", str(recipe), "--run-dir")
        assert pipe(*command, str(pipe.run_dir)).code == 0
        group = next(entry.gr_name for entry in grp.getgrall() if entry.gr_gid == os.getgid())
        opened = pipe.folder / "opened"
        assert pipe(*command, str(opened), "--group", group).code == 0
        assert pipe("resume", str(opened), "train.steps=4").code == 0
    finally:
        os.umask(before)
    assert modes(pipe.run_dir) == {"file": {"0o600"}, "folder": {"0o700"}}
    assert modes(opened) == {"file": {"0o640"}, "folder": {"0o2750"}}


def test_no_such_group(pipe: Pipe) -> None:
    result = pipe("run", str(pipe.recipe()), "--run-dir", str(pipe.run_dir), "--group", "nobodys")
    assert result.code == 2
    assert "cannot be opened to the group nobodys: there is no such group" in result.stderr


def test_a_folder_in_which_everybody_can_write(pipe: Pipe) -> None:
    pipe.run_dir.mkdir()
    pipe.run_dir.chmod(0o777)
    result = pipe.run(pipe.recipe())
    assert result.code == 2
    assert f"everybody can write in {pipe.run_dir} (chmod o-w '{pipe.run_dir}')" in result.stderr
    assert list(pipe.run_dir.iterdir()) == []
