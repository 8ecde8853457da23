"""The commands of the tutorial, one after the other, as the page has them, with a small model."""

from __future__ import annotations

import json
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.contracts.metrics import records
from tests.docs.blocks import ROOT, blocks
from tests.support.models import save_tokenizer, tiny_llama_config
from tests.support.pipe import Outcome, Pipe

PAGE = ROOT / "docs/tutorial.md"
LINES = [line for block in blocks(PAGE, "sh") for line in block.text.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("pipe ") and "doctor" not in line]
"""Without `pipe doctor`, whose measurements take as long as all of this: tests/pipeline/doctor."""
CODES = {"train.stpes=5": 2, "Ctrl-C": 75}
"""Exit codes of commands with these words; that of all others is 0."""


def small_repository(folder: Path) -> None:
    """Make `folder` look like the repository, with a small model in the quickstart."""
    recipe: dict[str, Any] = yaml.safe_load((ROOT / "recipes/quickstart.yaml").read_text("utf-8"))
    sizes = {"hidden_size": 96, "num_hidden_layers": 4, "max_position_embeddings": 128}
    special = {"pad_token_id": 130}  # the unknown words of the small tokenizer are token 0
    save_tokenizer(folder / "tokenizer")
    recipe["stages"]["model"] = {
        "use": "model.hf",
        "config": tiny_llama_config(**sizes, **special, intermediate_size=384, head_dim=16),
        "tokenizer": "../tokenizer",
        "chat_template": "plain",
    }
    (folder / "recipes").mkdir()
    for name in ("data", "models"):
        (folder / "recipes" / name).symlink_to(ROOT / "recipes" / name)
    (folder / "recipes/quickstart.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


def interrupted(pipe: Pipe, words: list[str], place: Path) -> Outcome:
    """Run a command, and press Ctrl-C when the first step is done."""
    metrics = pipe.folder / "runs/second/metrics.jsonl"
    started = pipe.fork(place, *words)
    while started.alive() and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    started.send(signal.SIGINT)
    return started.end()


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    """Return the folder, and the outcome of every command."""
    folder = tmp_path_factory.mktemp("the tutorial")
    small_repository(folder)
    pipe = Pipe(folder / "no plugin", folder, starts=True)
    outcomes = {}
    for number, line in enumerate(COMMANDS):
        command, _, comment = line.partition("#")
        words = shlex.split(command)[1:]
        if "Ctrl-C" in comment:
            place = tmp_path_factory.mktemp(f"output-{number}")
            outcomes[line] = interrupted(pipe, words, place)
        else:
            outcomes[line] = pipe(*words)
    return folder, outcomes


@pytest.mark.full
def test_every_command_ends_as_the_page_says(tutorial: tuple[Path, dict[str, Outcome]]) -> None:
    _, outcomes = tutorial
    assert len(outcomes) == len(COMMANDS) == 19
    for line, outcome in outcomes.items():
        (expected,) = {code for words, code in CODES.items() if words in line} or {0}
        assert outcome.code == expected, f"{line}\n{outcome.stdout}{outcome.stderr}"


def test_messages_are_those_on_the_page(tutorial: tuple[Path, dict[str, Outcome]]) -> None:
    shown = [block.text.strip() for block in blocks(PAGE, "console")]
    said = "".join(outcome.stdout + outcome.stderr for outcome in tutorial[1].values())
    assert len(shown) == 1
    assert all(text in said for text in shown)
    assert (
        "nothing to do: every stage has finished" in tutorial[1]["pipe resume runs/second"].stdout
    )


def test_both_runs_are_the_same_training(tutorial: tuple[Path, dict[str, Outcome]]) -> None:
    folder, _ = tutorial
    losses = {}
    for name in ("first", "second"):
        found = records(folder / "runs" / name / "metrics.jsonl")
        losses[name] = {one["step"]: one["loss"] for one in found if "loss" in one}
    assert list(losses["first"]) == list(losses["second"]) == list(range(1, 13))
    assert losses["second"] == pytest.approx(losses["first"], rel=1e-5)
    journal = (folder / "runs/second/journal.jsonl").read_text()
    assert '"stopped"' in journal
    engine = json.loads((folder / "runs/second/engine.json").read_text())
    assert engine["engine"] == "fully_shard"


def test_the_page_starts_as_the_readme_does() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for line in LINES[:3]:
        assert line in readme
