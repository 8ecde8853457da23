"""The live display of real runs in a terminal, and what is written where it cannot be drawn."""

from __future__ import annotations

import re

import pytest

from pipeline.contracts.metrics import records
from pipeline.utils.text import BARS
from pipeline.view.live import UNICODE
from tests.support.pipe import Pipe
from tests.support.terminal import Terminal
from tests.support.tier import spread
from tests.support.tiny_project import CHAIN, tiny_project

NAMES = "".join(UNICODE[state] for state in ("waiting", "running", "finished"))
MARKED = re.compile(rf"[{NAMES}] (\w+)(?: \d+:\d\d)?")
SHORT = "finished in"
COLOUR = re.compile(rb"\x1b\[[0-9;]*(?:3[0-7]|9[0-7])[0-9;]*m")
LINES = ["model: model.hf", "precision: precision.policy"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Pipe:
    folder = tmp_path_factory.mktemp("project")
    tiny_project(folder)
    return Pipe(folder, folder)


def chain_of(frame: list[str]) -> str:
    """Return the slots that a screen shows, in one line."""
    return "  ".join(line for line in frame if MARKED.match(line))


def trains(terminal: Terminal) -> bool:
    return any("step " in line and " of 100000" in line for line in terminal.display)


@pytest.mark.parametrize("columns", spread([80, 120], keep=1))
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
    assert COLOUR.search(terminal.raw)


def test_the_running_slot_is_marked_and_ctrl_c_stops_the_run(project: Pipe) -> None:
    """The training lasts until it was drawn: a short one may pass between two drawings. The run's
    folder has a space, so its name has to be quoted."""
    options = ["--run-dir", "a stopped run", "train.steps=100000"]
    terminal = Terminal(project, "run", "tiny.yaml", *options, columns=100)
    terminal.wait(lambda: "● train" in chain_of(terminal.display) and trains(terminal))
    drawn = list(terminal.frames)
    terminal.press(b"\x03")
    assert terminal.end() == 75, terminal.text
    seen = set()
    for chain in filter(None, map(chain_of, drawn)):
        marks = [(match[0][0], match[1]) for match in MARKED.finditer(chain)]
        if len(marks) < len(CHAIN):
            continue  # half of a drawing
        assert [slot for _, slot in marks] == list(CHAIN)
        signs = "".join(mark for mark, _ in marks)
        assert re.fullmatch(r"✓*●?·*", signs), chain
        seen |= {slot for mark, slot in marks if mark == "●"}
    assert "train" in seen
    whole = "\n".join(terminal.text)
    assert "stopped by SIGINT" in whole
    assert re.search(r"pipe resume '.*a\s+stopped run'", whole), whole
    assert not terminal.screen.cursor.hidden
    assert "Traceback" not in whole


def test_a_terminal_that_is_closed_costs_no_step(project: Pipe) -> None:
    options = ["--run-dir", "left", "train.steps=100000", "checkpoint.every=100000"]
    terminal = Terminal(project, "run", "tiny.yaml", *options, columns=80)
    terminal.wait(lambda: trains(terminal))
    assert terminal.hang_up() == 75
    folder = project.folder / "left"
    steps = [one["step"] for one in records(folder / "metrics.jsonl") if "loss" in one]
    (saved,) = (path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())
    assert saved == f"step-{steps[-1]:08d}"


def test_without_colours_and_in_a_dumb_terminal(project: Pipe) -> None:
    def terminal(name: str, **variables: str) -> Terminal:
        options = ["--run-dir", name, "--until", "precision"]
        return Terminal(project, "run", "tiny.yaml", *options, columns=80, **variables)

    plain, dumb = terminal("plain", NO_COLOR="1"), terminal("dumb", TERM="dumb")
    assert (plain.end(), dumb.end()) == (0, 0)
    assert not COLOUR.search(plain.raw)
    assert "✓ model  ✓ precision" in chain_of(plain.display)
    assert b"\x1b" not in dumb.raw
    assert dumb.display[:3] == ["run folder: dumb", *LINES]


def test_where_there_is_no_terminal(project: Pipe) -> None:
    """Lines are written, with debug messages if they are asked for, or nothing."""
    options = ["train.generate=null", "train.steps=4", "--until", "train", "--run-dir"]
    lines = project("run", "tiny.yaml", *options, "lines")
    loud = project("run", "tiny.yaml", *options, "loud", "--verbose")
    for done, name in ((lines, "lines"), (loud, "loud")):
        assert (done.code, done.stderr) == (0, "")
        said = [line for line in done.stdout.splitlines() if "ranks have the same" not in line]
        assert said[:3] == [f"run folder: {name}", *LINES]
        assert "\x1b[" not in done.stdout
    assert "snapshot of step-00000004" not in lines.stdout
    assert "snapshot of step-00000004" in loud.stdout
    quiet = project("run", "tiny.yaml", "--until", "precision", "--run-dir", "quiet", "--quiet")
    assert (quiet.code, quiet.stdout, quiet.stderr) == (0, "", "")
