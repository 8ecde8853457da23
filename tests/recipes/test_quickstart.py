"""A newcomer's run: the real model learns a task on two processes, and shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.pipe import Outcome, Pipe

ROOT = Path(__file__).parents[2]
PROMPT = "You took the money for the tablet two times. Order 2030."
STEPS = 4


class Done:
    """A finished quickstart."""

    def __init__(self, folder: Path, said: str) -> None:
        self.folder, self.said = folder, said
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def having(self, name: str) -> list[dict[str, Any]]:
        """Return the records with a key."""
        return [record for record in self.records if name in record]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("quickstart")
    recipe = str(ROOT / "recipes/quickstart.yaml")
    words = ("run", recipe, "--run-dir", str(folder / "run"))
    run = pipe(*words, f"train.steps={STEPS}", "train.generate.max_tokens=8")
    return Done(folder / "run", run.stdout)


def pipe(*words: str) -> Outcome:
    found = Pipe(ROOT / "no plugin", ROOT, starts=True)(*words)
    assert found.code == 0, found.stdout + found.stderr
    return found


def test_the_pretrained_model_is_trained(done: Done) -> None:
    losses = [record["loss"] for record in done.having("loss")]
    # loss of the pretrained model on these 8 answers; a random model has 10.8
    assert losses[0] == pytest.approx(2.264, abs=0.02)
    assert losses[-1] < losses[0] / 3
    engine = json.loads((done.folder / "engine.json").read_text())
    assert (engine["engine"], engine["world_size"]) == ("DistributedDataParallel", 2)
    assert engine["parameters"] == 134_515_008


def test_its_end_shows_that_it_worked(done: Done) -> None:
    before, after = (record["eval_loss"] for record in done.having("eval_loss"))
    assert before == pytest.approx(2.216, abs=0.02)
    assert after < before / 3
    first, last = (record["generated"][0]["text"] for record in done.having("generated"))
    assert not first.startswith("{")
    assert last.startswith('{"topic": "')
    lines = [" ".join(line.split()) for line in done.said.splitlines()]
    assert f"prompt {PROMPT}" in lines
    assert f"before {' '.join(first.split())}" in lines
    assert f"after {last}" in lines
    assert lines[-1] == f"talk to it pipe chat {done.folder}"


def test_the_export_answers(done: Done) -> None:
    said = pipe("generate", str(done.folder), PROMPT, "--max-tokens", "4")
    # A free greedy answer depends on the last bits of a processor's sums; its beginning does not.
    assert said.stdout.startswith('{"topic')
    assert f"step {STEPS}, {done.folder}/export, bf16, cpu" in said.stderr


def test_the_held_out_messages_are_not_trained_on() -> None:
    def parts(name: str) -> tuple[set[str], set[str]]:
        rows = (ROOT / "recipes/data" / name).read_text().splitlines()
        found = [[one["content"] for one in json.loads(row)["messages"]] for row in rows]
        tickets = [(text, json.loads(answer)) for text, answer in found]
        for text, ticket in tickets:
            assert list(ticket) == ["topic", "item", "order"]
            assert ticket["item"] in text
            assert str(ticket["order"]) in text
        items = {ticket["item"] for _, ticket in tickets}
        return items, {
            text.replace(ticket["item"], "*").replace(str(ticket["order"]), "#")
            for text, ticket in tickets
        }

    trained, held = parts("tickets.jsonl"), parts("tickets_heldout.jsonl")
    assert [len(one) for one in (*trained, *held)] == [96, 64, 12, 12]
    assert not trained[0] & held[0]
    assert not trained[1] & held[1]
