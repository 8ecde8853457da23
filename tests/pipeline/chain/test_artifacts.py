"""Several trainings in a chain: what is of which, and what no training takes from another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeline.chain.artifacts import Results, training_of, training_slots
from pipeline.chain.plan import Plan, plan_file
from pipeline.errors import RecipeError, UsageError

FILE = Path(__file__).parents[3] / "recipes" / "two_trainings.yaml"


def planned(*overrides: str) -> Plan:
    return plan_file(FILE, overrides, for_this_machine=False)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as refused:
        planned(*overrides)
    return [
        f"{one.key}: {one.message} ({one.hint})"
        for one in refused.value.problems
        if not one.warning
    ]


def test_each_slot_is_of_a_training() -> None:
    wiring = planned().view.wiring
    assert training_slots(wiring) == ["train", "chat"]
    of = {slot: training_of(wiring, slot) for slot in wiring.kinds}
    assert {slot for slot, training in of.items() if training == "chat"} == {
        "wrap_chat", "checkpoint_chat", "chat", "consolidate", "export",
    }  # fmt: skip
    # what stands between belongs to the training that is over: an export of it, for one
    assert {of["trained"], of["tickets"], of["train"], of["model"]} == {""}


def test_a_finished_training_is_no_training_of_the_recipe(tmp_path: Path) -> None:
    finished = f"train={{use: train.finished, checkpoint: {tmp_path}}}"
    wiring = planned(finished, "wrap=null", "checkpoint=null", "novel=null").view.wiring
    assert training_slots(wiring) == ["chat"]
    assert training_of(wiring, "checkpoint_chat") == ""


OWN = "and after slot `train`: each training takes its own"


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (
            ["checkpoint_chat"],
            [f"chat.use: `train.causal_lm` needs a slot `checkpoint` before it {OWN} (add "
             "`checkpoint2: {use: checkpoint.sharded}` before slot `chat`, or checkpoint.full)"],
        ),
        (
            ["wrap_chat"],
            [f"checkpoint_chat.use: `checkpoint.sharded` needs a slot `wrap` before it {OWN} (add "
             "`wrap2: {use: wrap.fsdp}` before slot `checkpoint_chat`, or wrap.zero, wrap.ddp, "
             "wrap.accelerate)"],
        ),
    ],
)  # fmt: skip
def test_a_training_takes_no_engine_and_no_checkpoints_of_another(
    left_out: Sequence[str], said: list[str]
) -> None:
    assert problems(*(f"{slot}=null" for slot in left_out)) == said


def test_a_training_that_nothing_goes_on_from_is_a_warning() -> None:
    (warning,) = planned("trained=null").warnings
    assert str(warning).partition(": ")[2] == (
        "train.use: no slot reads its result (to train it further, add a slot after it that "
        "returns its model (pipe stages model))"
    )
    assert planned().warnings == ()


def test_the_part_of_a_plan_that_is_of_a_training() -> None:
    plan = planned()
    parts = {slot: plan.of_training(slot) for slot in ("train", "chat")}
    assert [step.slot for step in parts["train"].slots] == [
        "model", "precision", "optimizer", "novel", "wrap", "checkpoint", "train",
    ]  # fmt: skip
    assert [step.slot for step in parts["chat"].slots] == [
        "model", "precision", "optimizer", "trained", "tickets", "wrap_chat", "checkpoint_chat",
        "chat", "consolidate", "export",
    ]  # fmt: skip
    assert list(parts["chat"].view.slots) == [step.slot for step in parts["chat"].slots]


class Pair(NamedTuple):
    """A result that is itself a tuple."""

    one: int
    other: int


class Taker:
    """Takes a number, an optional text, and a pair."""

    def take(self, first: bytes, number: int, text: str | None, pair: Pair) -> tuple[object, ...]:
        return first, number, text, pair


def test_arguments_are_the_latest_results_of_their_types() -> None:
    known = Results.of(1.5, Pair(1, 2)) | {"a": 1, "b": (2, "text"), "c": None}
    results = Results(known)
    assert results.call(Taker(), "take", b"first") == (b"first", 2, "text", Pair(1, 2))
    assert [*results.each(int)] == [1, 2]
    assert results.latest(float) == 1.5


def test_arguments_that_a_slot_is_wired_to() -> None:
    results = Results(a=1, b=2, c="text", d=Pair(1, 2))
    assert results.call(Taker(), "take", b"", {"number": "a"}) == (b"", 1, "text", Pair(1, 2))
    left_out = {"number": "b", "text": None}
    assert results.call(Taker(), "take", b"", left_out) == (b"", 2, None, Pair(1, 2))
    assert results.missing(Taker(), "take", {"number": "gone", "pair": None}) == ["int", "Pair"]


def test_what_is_missing_is_named_unless_it_is_optional() -> None:
    assert Results(a="text").missing(Taker(), "take") == ["int", "Pair"]
    assert Results(a=1, b=Pair(1, 2)).missing(Taker(), "take") == []
    assert Results(a=1, b=Pair(1, 2)).call(Taker(), "take", b"")[2] is None
    with pytest.raises(UsageError, match="no number"):
        Results(a="text").require(int, "no number")
