"""The live display of real runs in a terminal, and what is written where it cannot be drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.contracts.metrics import records
from pipeline.utils.text import BARS
from pipeline.view.live import UNICODE
from tests.support.pipe import Pipe
from tests.support.terminal import Terminal
from tests.support.tiny_project import CHAIN, tiny_project

NAMES = "".join((UNICODE.waiting, UNICODE.running, UNICODE.finished))
MARKED = re.compile(rf"[{NAMES}] (\w+)(?: \d+:\d\d)?")
SHORT = "finished in"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Pipe:
    folder = tmp_path_factory.mktemp("project")
    tiny_project(folder)
    return Pipe(folder, folder)


def chain_of(frame: list[str]) -> str:
    """Return the slots that a screen shows, in one line."""
    lines = [line for line in frame if MARKED.match(line)]
    return "  ".join(lines)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_run_is_drawn(columns: int, project: Pipe) -> None:
    terminal = Terminal(project, "run", "tiny.yaml", "--run-dir", f"run-{columns}", columns=columns)
    assert terminal.end() == 0, terminal.text
    last = terminal.display
    at = next(number for number, line in enumerate(last) if line.startswith(f"run-{columns}  "))
    drawn = last[at : next(n for n, line in enumerate(last) if line.startswith(SHORT))]
    assert re.fullmatch(rf"run-{columns}  wrap.ddp, 2 processes, cpu +\d:\d\d", drawn[0])
    assert len(drawn[0]) == columns
    assert chain_of(drawn) == "  ".join(f"✓ {slot}" for slot in CHAIN)
    labels = [line.split("  ")[0] for line in drawn if not MARKED.match(line)][1:]
    assert labels == ["training", "loss", "held out", "step", "speed", "memory", "saved"]
    assert "step 8 of 8" in "\n".join(drawn)
    (loss,) = [line for line in drawn if line.startswith("loss ")]
    assert re.fullmatch(rf"loss +\d\.\d{{4}}  [{BARS}]{{8}}", loss)
    assert loss[-8] == BARS[-1]
    # nothing is left of earlier drawings, and what is logged stands above, once
    whole = "\n".join(terminal.text)
    assert whole.count("wrap.ddp, 2 processes") == whole.count("step 8 of 8") == 1
    assert whole.count("step 4  A stage ->") == whole.count("step 8  A stage ->") == 1
    assert re.search(r"^step \d/8", whole, re.MULTILINE) is None  # the drawing has it
    assert [number for number, line in enumerate(last) if not line] == [at - 1]
    assert terminal.screen.cursor.x == 0
    assert not terminal.screen.cursor.hidden


def test_the_running_slot_is_marked(project: Pipe) -> None:
    """The training lasts until it was drawn: a short one may pass between two drawings."""
    options = ["--run-dir", "marked", "--until", "train", "train.steps=100000"]
    terminal = Terminal(project, "run", "tiny.yaml", *options, columns=80)
    terminal.wait(lambda: "● train" in chain_of(terminal.display))
    drawn = list(terminal.frames)
    terminal.press(b"\x03")
    assert terminal.end() == 75, terminal.text
    order = list(CHAIN)[:7]
    seen = set()
    for chain in filter(None, map(chain_of, drawn)):
        marks = [(match[0][0], match[1]) for match in MARKED.finditer(chain)]
        if len(marks) < len(order):
            continue  # half of a drawing
        assert [slot for _, slot in marks] == order
        signs = "".join(mark for mark, _ in marks)
        assert re.fullmatch(r"✓*●?·*", signs), chain
        seen |= {slot for mark, slot in marks if mark == "●"}
    assert "train" in seen


def test_ctrl_c_stops_it_and_says_how_to_go_on(project: Pipe) -> None:
    """The run's folder has a space, so its name has to be quoted."""
    options = ["--run-dir", "a stopped run", "train.steps=100000"]
    terminal = Terminal(project, "run", "tiny.yaml", *options, columns=100)
    terminal.wait(
        lambda: any("step " in line and " of 100000" in line for line in terminal.display)
    )
    terminal.press(b"\x03")
    assert terminal.end() == 75
    whole = "\n".join(terminal.text)
    assert "stopped by SIGINT" in whole
    assert re.search(r"pipe resume '.*a\s+stopped run'", whole), whole
    assert not terminal.screen.cursor.hidden
    assert "Traceback" not in whole


def test_a_terminal_that_is_closed_costs_no_step(project: Pipe) -> None:
    options = ["--run-dir", "left", "train.steps=100000", "checkpoint.every=100000"]
    terminal = Terminal(project, "run", "tiny.yaml", *options, columns=80)
    terminal.wait(
        lambda: any("step " in line and " of 100000" in line for line in terminal.display)
    )
    assert terminal.hang_up() == 75
    folder = project.folder / "left"
    steps = [one["step"] for one in records(folder / "metrics.jsonl") if "loss" in one]
    (saved,) = (path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())
    assert saved == f"step-{steps[-1]:08d}"


ESCAPE = "\x1b["
COLOUR = re.compile(rb"\x1b\[[0-9;]*(?:3[0-7]|9[0-7])[0-9;]*m")


def test_without_colours(project: Pipe) -> None:
    plain, coloured = (
        Terminal(project, "run", "tiny.yaml", "--run-dir", name, "--until", "precision",
                 columns=80, **variables)
        for name, variables in (("plain", {"NO_COLOR": "1"}), ("coloured", {}))
    )  # fmt: skip
    assert (plain.end(), coloured.end()) == (0, 0)
    assert COLOUR.search(coloured.raw)
    assert not COLOUR.search(plain.raw)
    assert "✓ model  ✓ precision" in chain_of(plain.display)


def test_a_dumb_terminal_gets_lines(project: Pipe) -> None:
    terminal = Terminal(project, "run", "tiny.yaml", "--run-dir", "dumb", "--until", "precision",
                        columns=80, TERM="dumb")  # fmt: skip
    assert terminal.end() == 0
    assert b"\x1b" not in terminal.raw
    assert terminal.display[:3] == [
        "run folder: dumb", "model: model.hf", "precision: precision.policy"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("option", "first"),
    [
        ([], ["run folder: lines", "model: model.hf", "precision: precision.policy"]),
        (["--quiet"], []),
        (["--verbose"], ["run folder: lines-v", "model: model.hf", "precision: precision.policy"]),
    ],
)
def test_where_there_is_no_terminal(option: list[str], first: list[str], project: Pipe) -> None:
    name = "-".join(["lines", *(one[2] for one in option)])
    done = project("run", "tiny.yaml", "--run-dir", name, "--until", "precision", *option)
    assert (done.code, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if "ranks have the same" not in line]
    assert lines[: len(first)] == first
    assert bool(lines) == bool(first)
    assert ESCAPE not in done.stdout


def test_debug_messages_are_shown_if_asked_for(project: Pipe, tmp_path: Path) -> None:
    options = ["--until", "train", "train.generate=null", "train.steps=4"]
    quiet = project("run", "tiny.yaml", *options, "--run-dir", str(tmp_path / "one"))
    loud = project("run", "tiny.yaml", *options, "--run-dir", str(tmp_path / "two"), "--verbose")
    assert (quiet.code, loud.code) == (0, 0)
    assert "snapshot of step-00000004" not in quiet.stdout
    assert "snapshot of step-00000004" in loud.stdout
