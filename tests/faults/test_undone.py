"""A resume that fails before it has done anything leaves the run as it was."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.launch.job import SETTINGS, UNDONE
from pipeline.view.run import History, Run
from tests.support.pipe import Pipe
from tests.support.tiny_recipe import training, write


def settings(folder: Path) -> dict[str, bytes | None]:
    files = {name: folder / name for name in SETTINGS}
    return {name: file.read_bytes() if file.exists() else None for name, file in files.items()}


def state(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the state of a run and of its slots, as `pipe status` has them."""
    history = History(folder)
    run = Run(folder, history.uses)
    run.look()
    assert run.state == history.state
    found = {slot: one.state for slot, one in run.slots.items()}
    assert found == {slot: one.state for slot, one in history.slots.items()}
    return run.state, found


WRONG = {
    "train.global_batch_size=8": "belongs to another training",
    "checkpoint.folder=elsewhere": "now there are none in",
    "data.size=-1": "failed in slot `data`",
}
"""Override of a finished run -> why it fails."""


def test_a_finished_run_stays_finished_under_its_own_recipe(pipe: Pipe) -> None:
    recipe = write(pipe.folder / "a.yaml", training(checkpoint={}, train={"steps": 2}))
    assert pipe.run(recipe).code == 0
    run, before, finished = str(pipe.run_dir), settings(pipe.run_dir), state(pipe.run_dir)
    assert finished[0] == "finished"
    for wrong, why in WRONG.items():
        refused = pipe("resume", run, wrong, "train.steps=3")
        assert refused.code == 1
        assert why in refused.stderr
        assert refused.stderr.splitlines()[-1] == UNDONE
        assert "pipe resume" not in refused.stderr
        assert settings(pipe.run_dir) == before
        assert state(pipe.run_dir) == finished
        assert pipe.events()[-1]["undone"]
        assert why not in (pipe.run_dir / "report.html").read_text()
    listed = json.loads(pipe("ls", str(pipe.run_dir.parent), "--json").stdout)
    assert [(one["state"], one["step"]) for one in listed] == [("finished", 2)]
    went_on = pipe("resume", run, "train.steps=3")
    assert went_on.code == 0, went_on.stderr
    assert went_on.stdout.startswith("continues at step 2 (6 of 7 slots done)\n")
    assert state(pipe.run_dir) == finished
