"""What a launching process shows: failures of a view, and the pipe from rank 0."""

from __future__ import annotations

import io
import os
import sys
from collections import deque
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.distributed.signals import Interrupted
from pipeline.view.live import Header, LiveDisplay
from pipeline.view.run import Run
from pipeline.view.screen import LinePipe, Screen, View
from tests.pipeline.view.folders import SLOTS, made


class Failing(View):
    """Raises at its second refresh, and whenever it is asked to end."""

    prints = True

    def __init__(self, error: BaseException) -> None:
        self.error, self.refreshed, self.abandoned = error, 0, 0

    def refresh(self, lines: deque[str]) -> None:
        self.refreshed += 1
        if self.refreshed == 2:
            raise self.error
        lines.clear()

    def close(self, lines: deque[str]) -> None:
        raise self.error

    def end(self) -> None:
        raise self.error

    def abandon(self) -> None:
        self.abandoned += 1


@pytest.mark.parametrize("error", [OSError(5, "terminal is gone"), SystemExit(1), KeyError("step")])
def test_a_view_that_fails_ends_nothing_else(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Failing(error)
    screen = Screen(lambda: failing)
    for number in range(4):
        os.write(screen.output or -1, f"line {number}\n".encode())
        screen.refresh()
    os.write(screen.output or -1, b"line 4")
    screen.close()
    screen.end()
    assert (failing.refreshed, failing.abandoned) == (2, 1)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("the display has ended: ")
    assert lines == [f"line {number}" for number in (1, 2, 3, 4)]


def test_a_view_or_pipe_that_cannot_be_made_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make() -> View:
        raise OSError(28, "no space left")

    monkeypatch.setattr("pipeline.view.screen.LinePipe", make)
    failing = Failing(OSError("closed"))
    for screen in (Screen(make), Screen(lambda: failing)):
        screen.refresh()
        screen.close()
        assert screen.output is None
    assert capsys.readouterr().err.count("no space left") == 2
    assert (failing.refreshed, failing.abandoned) == (0, 1)


def test_a_signal_is_not_a_failure_of_the_view() -> None:
    screen = Screen(lambda: Failing(Interrupted(15)))
    screen.refresh()
    with pytest.raises(Interrupted):
        screen.refresh()


def test_standard_error_is_usable_when_the_terminal_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(5, "terminal is gone")
            return super().write(text)

    terminal, errors = Gone(), io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", errors)
    run = Run(made(tmp_path / "run"), SLOTS)
    console = Console(file=terminal, force_terminal=True)
    screen = Screen(lambda: LiveDisplay(run, Header(name="run", where="here"), console=console))
    assert screen.output is not None
    terminal.gone = True
    os.write(screen.output, b"a line\nanother\n")
    screen.refresh()
    print("restarting", file=sys.stderr)
    os.write(screen.output, b"a warning\n")
    screen.close()
    assert errors.getvalue().splitlines() == [
        "the display has ended: terminal is gone", "restarting", "a line", "another", "a warning",
    ]  # fmt: skip
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(screen.output)


def test_lines_of_another_process() -> None:
    pipe = LinePipe()
    assert list(pipe.lines()) == []
    os.write(pipe.write, b"one\ntw")
    assert list(pipe.lines()) == ["one"]
    os.write(pipe.write, b"o\n" + b"".join(b"\r%d %%" % number for number in range(101)) + b"\n")
    assert list(pipe.lines()) == ["two", "100 %"]  # a bar is one line
    os.write(pipe.write, b"thr\xff")
    assert pipe.close() == ["thr\N{REPLACEMENT CHARACTER}"]
