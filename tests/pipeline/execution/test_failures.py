"""The choice and the display of one failure out of several ranks'."""

from __future__ import annotations

import errno
import json
import signal
from pathlib import Path

import pytest

from pipeline.chain.registry import Entry
from pipeline.distributed import environment
from pipeline.distributed.environment import Shared
from pipeline.errors import DataError
from pipeline.execution import failures
from pipeline.execution.failures import Exit
from pipeline.utils.files import memory_file


def fail(run_dir: Path, rank: int, error: Exception, slot: str = "train") -> None:
    try:
        raise error
    except Exception as raised:
        failures.record(run_dir, rank, slot, raised)


def told(run_dir: Path, *exits: tuple[int, int], slot: str | None = "wrap") -> list[str]:
    ends = [Exit(rank=rank, code=code) for rank, code in exits]
    return str(failures.first(run_dir, ends, slot)).splitlines()


def test_the_earliest_report_is_shown_with_its_place(tmp_path: Path) -> None:
    fail(tmp_path, 3, ValueError("first"))
    fail(tmp_path, 0, RuntimeError("then"))
    lines = told(tmp_path, (0, 1), (3, 1))
    assert lines[0] == "rank 3 failed in slot `train`: ValueError: first"
    assert lines[1].startswith(f"  at {__file__}:")
    assert lines[1].endswith(" in fail")
    assert lines[2:] == [
        f"  traceback: {tmp_path}/failures/rank-00003.txt",
        f"  continue with: pipe resume {tmp_path}",
    ]
    assert failures.first_rank(tmp_path) == 3
    assert "ValueError: first" in Path(lines[2].split(": ")[1]).read_text()
    failures.clear(tmp_path)
    assert failures.first_rank(tmp_path) is None


def test_the_place_in_a_plugin_is_shown_whatever_it_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry(name="callback.x", value=f"{__name__}:X", distribution="acme", version="1")
    monkeypatch.setattr("pipeline.chain.registry.installed_entries", lambda group: [entry])
    try:
        json.loads("no JSON")
    except ValueError as error:
        failures.record(tmp_path, 0, "train", error)
    assert told(tmp_path, (0, 1))[1].startswith(f"  at {__file__}:")


def test_a_mistake_of_the_user_needs_no_traceback(tmp_path: Path) -> None:
    fail(tmp_path, 0, DataError("empty", file="a.txt", row=2), slot="")
    assert told(tmp_path, (0, 1)) == [
        "rank 0 failed before the first slot: a.txt:2: empty",
        f"  after the change: pipe resume {tmp_path}",
    ]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGKILL, "was killed by SIGKILL (the system does this when memory runs out)"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-63, "was killed by signal 63"),
        (-signal.SIGTERM, "was killed by SIGTERM"),
        (3, "ended by itself with exit code 3"),
        (0, "ended by itself with exit code 0"),
    ],
)
def test_a_silent_death_comes_before_what_it_made_others_raise(
    tmp_path: Path, code: int, words: str
) -> None:
    fail(tmp_path, 0, RuntimeError("connection closed by peer"))
    lines = told(tmp_path, (0, 1), (1, code), (2, -signal.SIGABRT))
    assert lines == [
        f"rank 1 {words} in slot `wrap`",
        f"  log: {tmp_path}/logs/rank-00001.log",
        f"  continue with: pipe resume {tmp_path}",
    ]


CAUSE = "rank 1 failed in slot `train`: ValueError: cause"


@pytest.mark.parametrize(
    ("raised", "exits", "slot", "first"),
    [
        (True, [(0, -signal.SIGABRT), (1, 1)], "wrap", CAUSE),  # a library, as a peer was lost
        (True, [(1, -signal.SIGSEGV)], "wrap", CAUSE),  # after its own report
        (False, [(0, -signal.SIGTERM)], None, "rank 0 was killed by SIGTERM before the first slot"),
        (False, [], None, "the run failed without saying why"),
    ],
)
def test_the_cause_comes_first(
    raised: bool, exits: list[tuple[int, int]], slot: str | None, first: str, tmp_path: Path
) -> None:
    if raised:
        fail(tmp_path, 1, ValueError("cause"))
    assert told(tmp_path, *exits, slot=slot)[0] == first


def test_a_report_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    fail(tmp_path, 0, ValueError("x"))
    path = tmp_path / "failures" / "rank-00000.json"
    path.write_text(json.dumps(json.loads(path.read_text()))[:20])
    assert told(tmp_path, (0, 1))[0].startswith("rank 0 ended by itself with exit code 1")


def test_messages_are_short(tmp_path: Path) -> None:
    assert failures.describe(AssertionError()) == "AssertionError"
    assert failures.describe(SystemExit(0)) == "SystemExit: 0"
    long = failures.describe(RuntimeError("\n".join(f"frame {n}" for n in range(99))))
    assert long.splitlines()[0] == "RuntimeError: frame 0"
    assert long.splitlines()[11:] == ["frame 11", "..."]


def test_a_failure_that_cannot_be_written_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failures").touch()
    fail(tmp_path, 0, ValueError("disk"))
    assert capsys.readouterr().err.endswith("ValueError: disk\n\n")


def test_a_full_disk_has_its_sentence_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output that does not fit into the run's folder is in the launcher's file."""
    run, memory = tmp_path / "run", memory_file("failures")
    run.mkdir()
    (run / "failures").touch()
    shared = Shared(heartbeats=-1, number=0, failures=memory, stacks=-1, store=None)
    monkeypatch.setattr(environment, "shared", shared)
    fail(run, 1, OSError(errno.ENOSPC, "No space left on device", f"{run}/metrics.jsonl"))
    assert told(run, (1, 1)) == [
        f"rank 1 failed in slot `train`: No space left on device: {run}/metrics.jsonl",
        f"  continue with: pipe resume {run}",
    ]
    assert failures.first_rank(run) == 1
