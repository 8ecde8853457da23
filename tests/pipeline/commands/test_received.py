"""Folders that somebody has sent: whatever is in them, every command ends in time, within a bound
of memory, and with a sentence."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pipeline.cli import main
from tests.fuzz.hostile import bounded
from tests.pipeline.conftest import TinyRun
from tests.support.pipe import Pipe
from tests.support.tier import spread

SPARSE = 3 << 29
"""Bytes of a file that takes no room on the disk: more than `bounded` lets a command have."""


def sparse(file: Path, before: str) -> None:
    file.touch()
    os.truncate(file, SPARSE)


def link(target: str) -> Callable[[Path, str], object]:
    return lambda file, before: file.symlink_to(target)


def text(content: str) -> Callable[[Path, str], object]:
    return lambda file, before: file.write_text(content)


def retyped(value: Any) -> Callable[[Path, str], object]:
    """Return what puts `value` in place of every value of the JSON objects in a file."""

    def change(file: Path, before: str) -> None:
        changed = []
        for line in before.splitlines() if file.suffix == ".jsonl" else [before]:
            try:
                found = json.loads(line)
            except ValueError:
                found = {}
            known = found if isinstance(found, dict) else {}
            kept = {key: known[key] if key in ("event", "step") else value for key in known}
            changed.append(json.dumps(kept))
        file.write_text("\n".join(changed) + "\n")

    return change


KINDS: dict[str, Callable[[Path, str], object]] = {
    "fifo": lambda file, before: os.mkfifo(file), "device": link("/dev/zero"),
    "folder": lambda file, before: file.mkdir(), "dangling": link("/nowhere/at/all"),
    "outside": lambda file, before: file.symlink_to(file.parents[2] / "secret.txt"),
    "sparse": sparse, "deep": text("[" * 200_000), "empty": text(""), "list": text("[1]\n"),
    "binary": lambda file, before: file.write_bytes(bytes(range(256)) * 9),
    "texts": retyped("x"), "lists": retyped([[]]), "objects": retyped({"a": {"b": 1}}),
    "large": retyped(10**400), "negative": retyped(-1), "true": retyped(True),
    "null": retyped(None),
}  # fmt: skip
"""Kind of damage -> what puts it in place of a file, whose content was `before`."""
FILES = (
    "recipe.yaml", "journal.jsonl", "metrics.jsonl", "environment.json", "engine.json",
    "origins.json", "activity.json", "plan.json", "hardware.jsonl", "memory.json", "lock",
    "checkpoints.at",
    "logs/rank-00000.log", "failures/rank-00000.json", "export/export.json", "export/config.json",
    "export/model.safetensors", "export/tokenizer_config.json", "evaluation.json",
    "checkpoints/step-00000008/manifest.json", "logs", "failures", "checkpoints", "export",
)  # fmt: skip
COMMANDS = (
    "ls runs", "ls runs --json", "status RUN", "status RUN --json", "logs RUN", "report RUN",
    "compare RUN RUN", "inspect RUN", "inspect RUN --verify", "verify RUN", "clean RUN",
    "track RUN", "check RUN/recipe.yaml", "show RUN/recipe.yaml", "dag RUN/recipe.yaml",
    "plan RUN/recipe.yaml",
    "verify RUN/export", "inspect RUN/checkpoints/step-00000008",
    "convert RUN/checkpoints/step-00000008 out --to full", "resume RUN --dry-run",
    "generate RUN A --max-tokens 2 --device cpu",
    "generate RUN/checkpoints/step-00000008 A --max-tokens 2 --device cpu",
)  # fmt: skip
WALK = [*itertools.product(FILES, KINDS, COMMANDS)]
SECRET = "the content of a file that was not sent"


@pytest.fixture
def received(tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of runs: one to be damaged, and a whole one."""
    (tmp_path / "secret.txt").write_text(SECRET)
    sent = Path(shutil.copytree(tiny_run.folder, tmp_path / "runs/sent"))
    recipe = (sent / "recipe.yaml").read_text()
    tracked = str(tiny_run.pipe.folder / "runs.sqlite")  # which other tests look at
    (sent / "recipe.yaml").write_text(recipe.replace(tracked, str(tmp_path / "runs.sqlite")))
    shutil.copytree(sent, tmp_path / "runs/whole", copy_function=os.link)
    for name in ("activity.json", "plan.json", "memory.json"):
        if not (sent / name).exists():
            (sent / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    return sent


def damage(file: Path, kind: str) -> None:
    """Put something of a kind in place of a file."""
    before = file.read_text("utf-8", errors="replace") if file.is_file() else ""
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    KINDS[kind](file, before)


def ends_with_a_sentence(received: Path, command: str) -> str:
    """Return what a command says."""
    words = command.replace("RUN", str(received)).split()
    with bounded(received.parent, may_leave=True):
        result = CliRunner().invoke(main, words)
    require_sentence(command, result.output + str(result.exception or ""), result.exit_code)
    return result.output


def require_sentence(command: str, said: str, code: int) -> None:
    assert "a bug in pipe" not in said, (command, said)
    assert "Traceback" not in said, (command, said)
    assert SECRET not in said, (command, said)
    assert code in (0, 1, 2, 3), (command, said)


@pytest.mark.parametrize(("file", "kind", "command"), spread(WALK[::7], 134))
def test_a_damaged_folder(received: Path, file: str, kind: str, command: str) -> None:
    damage(received / file, kind)
    said = ends_with_a_sentence(received, command)
    if command == "ls runs":
        assert "runs/whole" in said


WRITING = ("resume RUN", "export RUN --out out --procs 1")
WRITTEN = [*itertools.product(FILES, KINDS, WRITING)]


@pytest.mark.parametrize(("file", "kind", "command"), spread(WRITTEN[::7], 12))
def test_a_damaged_folder_that_is_gone_on_with(
    received: Path, plugin: Path, tmp_path: Path, file: str, kind: str, command: str
) -> None:
    damage(received / file, kind)
    done = Pipe(plugin, tmp_path)(*command.replace("RUN", str(received)).split())
    require_sentence(command, done.stdout + done.stderr, done.code)
    assert (tmp_path / "secret.txt").read_text() == SECRET


SHOWING = {
    "status RUN": "recipe.yaml", "logs RUN": "recipe.yaml", "report RUN": "recipe.yaml",
    "compare RUN RUN": "recipe.yaml", "track RUN": "recipe.yaml", "verify RUN": "recipe.yaml",
    "resume RUN": "recipe.yaml", "clean RUN": "recipe.yaml", "export RUN --out out": "recipe.yaml",
    "run recipe.yaml --run-dir RUN": "recipe.yaml", "inspect RUN": "checkpoints.at",
    "verify  RUN": "export/export.json",
}  # fmt: skip


@pytest.mark.parametrize("command", SHOWING)
def test_nothing_outside_of_the_run_is_shown(received: Path, command: str) -> None:
    """The file that a link leads to is one of its kind, which this person may read."""
    file = received / SHOWING[command]
    recipe = yaml.safe_load((received / "recipe.yaml").read_text())
    recipe["stages"]["train"]["steps"] = 987654
    content = {
        "recipe.yaml": json.dumps(recipe), "checkpoints.at": "/987654",
        "export/export.json": '{"writer": "987654"}',
    }  # fmt: skip
    secret = received.parents[1] / "recipe.yaml"
    secret.write_text(content[SHOWING[command]])
    file.unlink(missing_ok=True)
    file.symlink_to(secret)
    said = ends_with_a_sentence(received, command)
    assert "987654" not in said
    assert "leads out of" in said or "is not an export of ours" in said
    assert secret.read_text() == content[SHOWING[command]]
