"""Run folders and their lock."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import stat
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pipeline.errors import RunLocked, UsageError
from pipeline.execution import rundir


def test_new_folders_are_private_and_never_the_same(tmp_path: Path) -> None:
    folders = [rundir.create(tmp_path / "runs", "name") for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.name.startswith("name-") for folder in folders)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot create .*: Not a directory"):
        rundir.create(tmp_path / "file", "name")
    with pytest.raises(UsageError, match=r"cannot create .*: Not a directory"):
        rundir.claim(tmp_path / "file" / "run")


def test_a_given_folder_holds_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no newest run to name
    folder = rundir.claim(tmp_path / "run")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert rundir.claim(folder) == folder
    with pytest.raises(
        UsageError, match=r"not the folder of a run \(pipe run RECIPE starts a run\)"
    ):
        rundir.existing(folder)
    (folder / "recipe.yaml").write_text("name: x\n")
    assert rundir.existing(folder) == folder
    assert rundir.claim(folder) == folder
    with pytest.raises(
        UsageError, match=r"already holds a run \(without --fresh that run continues\)"
    ):
        rundir.claim(folder, fresh=True)
    assert [path.name for path in folder.iterdir()] == ["recipe.yaml"]


def test_the_environment_is_written_and_what_has_changed_is_told(tmp_path: Path) -> None:
    now = rundir.machine_facts()
    assert {"torch", "transformers", "numpy"} <= now["packages"].keys()
    assert rundir.write_environment(tmp_path, now) == []
    facts = json.loads((tmp_path / "environment.json").read_text())
    assert facts == now
    assert facts["folder"] == str(Path.cwd())
    assert rundir.write_environment(tmp_path, {**now, "time": "later", "command": []}) == []
    packages = {name: v for name, v in now["packages"].items() if name != "numpy"}
    other = {**now, "python": "3.99.1", "packages": {**packages, "torch": "9.8.7"}}
    assert rundir.write_environment(tmp_path, other) == [
        f"numpy {now['packages']['numpy']} -> not there",
        f"python {now['python']} -> 3.99.1",
        f"torch {now['packages']['torch']} -> 9.8.7",
    ]


@pytest.mark.parametrize("text", ["", "[1]", '{"packages": 3}', '{"packages": {"torch": 1}}'])
def test_an_environment_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "environment.json").write_text(text)
    facts = {"python": "3.11.1", "packages": {}}
    assert rundir.write_environment(tmp_path, facts) == []


@pytest.mark.parametrize("left", ["checkpoints", "checkpoints.at", "journal.jsonl"])
def test_what_a_run_has_left_is_not_gone_on_from(tmp_path: Path, left: str) -> None:
    (tmp_path / "slurm-1.out").touch()
    assert rundir.claim(tmp_path) == tmp_path
    (tmp_path / left).mkdir()
    with pytest.raises(UsageError) as caught:
        rundir.claim(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds {left} of another run, and no recipe.yaml (name a new folder; to start "
        "from a checkpoint in this one, name that as the checkpoint slot's start_from)"
    )


def _hold(folder: Path, ready: Connection) -> None:
    with rundir.locked(folder):
        ready.send(os.getpid())
        ready.recv()


def test_the_lock_is_free_when_its_owner_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not rundir.is_locked(tmp_path)
    monkeypatch.setattr(rundir, "LOCK_SECONDS", 0.1)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_hold, args=(tmp_path, theirs))
    owner.start()
    pid = ours.recv()
    assert rundir.is_locked(tmp_path)
    with pytest.raises(RunLocked, match=f"is in use by process {pid} on "), rundir.locked(tmp_path):
        raise AssertionError("entered")
    owner.kill()
    owner.join()
    assert not rundir.is_locked(tmp_path)
    with rundir.locked(tmp_path):
        assert rundir.is_locked(tmp_path)
        assert f"process {os.getpid()} on " in (tmp_path / "lock").read_text()
    assert not rundir.is_locked(tmp_path)


def test_a_glance_of_pipe_ls_keeps_nobody_out(tmp_path: Path) -> None:
    """is_locked holds a shared lock for a moment; locked asks again."""
    import fcntl
    import threading

    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        timer = threading.Timer(0.2, fcntl.flock, (file, fcntl.LOCK_UN))
        timer.start()
        with rundir.locked(tmp_path):
            timer.join()


def test_no_lock_without_write_access(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"cannot write in .*: No such file"),
        rundir.locked(tmp_path / "none"),
    ):
        raise AssertionError("entered")


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """A run from another person can link to any file that its receiver may write."""
    (tmp_path / "target").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(UsageError, match="is a link, and nothing is written"):  # noqa: SIM117
        with rundir.locked(tmp_path):
            raise AssertionError("entered")
    assert (tmp_path / "target").read_text() == "kept"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre without `-o flock`: no run is possible there, but looking at one is."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(UsageError, match=r"lock cannot be locked .*Lustre: -o flock"),
        rundir.locked(tmp_path),
    ):
        pass
    assert not rundir.is_locked(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_a_lock_that_is_no_file(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "lock")
    for look in (lambda: rundir.is_locked(tmp_path), lambda: rundir.locked(tmp_path).__enter__()):
        with pytest.raises(UsageError):
            look()
