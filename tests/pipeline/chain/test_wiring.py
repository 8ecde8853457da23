"""Wires: by default, by `takes`, and next to mistakes; what reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.chain.plan import Plan
from pipeline.chain.wiring import SlotType, wired
from pipeline.contracts.callbacks import StepCallback
from pipeline.contracts.engine import Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.optimizer import OptimizerPlan
from pipeline.contracts.stage import Context, Durable
from pipeline.errors import RecipeError
from pipeline.execution.resume import digests
from tests.pipeline.chain.conftest import Planned

RECIPE = """\
name: two
launch: {device: cpu}
stages:
  model: {use: model.fake}
  optimizer: {use: optimizer.adam}
  teacher: {use: wrap.red}
  score: {use: score.mine}
  student: {use: wrap.blue}
  data: {use: data.text, files: [a.txt]}
  train: {use: method.distil}
"""


class Scores(Durable):
    """Of a model."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score with a model."""

    def run(self, ctx: Context, engine: Engine) -> Scores:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class Distil:
    """Read two engines."""

    def run(
        self, ctx: Context, engine: Engine, teacher: Engine, watch: StepCallback | None
    ) -> Scores:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Give a callback, after another."""

    def run(self, ctx: Context, earlier: StepCallback | None) -> StepCallback:
        raise AssertionError("never run")


@pytest.fixture
def plan(planned: Planned) -> Callable[..., Plan]:
    # another kind: stages of kind train return a TrainedRun
    own = {"score.mine": Score, "method.distil": Distil, "callback.mine": Watch}
    return partial(planned, stages=own)


TAKES = RECIPE.replace("method.distil}", "method.distil, takes: {teacher: teacher}}").replace(
    "  data: {use: data.text, files: [a.txt]}\n", ""
)


def inputs(plan: Plan, slot: str) -> Mapping[str, str | None]:
    return next(step.inputs for step in plan.slots if step.slot == slot)


def test_a_recipe_names_the_slot(plan: Callable[..., Plan]) -> None:
    made = plan(text=TAKES)
    assert inputs(made, "train") == {"engine": "student", "teacher": "teacher", "watch": None}
    assert inputs(made, "score") == {"engine": "teacher"}
    swapped = plan("train.takes.engine=teacher", "train.takes.teacher=student", text=TAKES)
    assert inputs(swapped, "train") == {"engine": "teacher", "teacher": "student", "watch": None}
    usual = plan("train.takes=null", text=TAKES)
    assert inputs(usual, "train") == {"engine": "student", "teacher": "student", "watch": None}
    # digests of a recipe are digests of the wires that it has, written or not
    written = digests(plan("train.takes.engine=student", text=TAKES))
    assert written == digests(made)
    assert {slot for slot, one in written.items() if digests(swapped)[slot] != one} == {"train"}


def test_an_optional_artifact_is_left_out(plan: Callable[..., Plan]) -> None:
    text = TAKES.replace(
        "  train:", "  one: {use: callback.mine}\n  two: {use: callback.mine}\n  train:"
    )
    assert inputs(plan(text=text), "train")["watch"] == "two"
    assert inputs(plan(text=text), "two") == {"earlier": "one"}
    apart = plan(
        "two.takes={earlier: null}",
        "train.takes.watch=one",
        text=text + "  last: {use: method.distil, takes: {watch: two}}\n",
    )
    assert (inputs(apart, "two"), inputs(apart, "train")["watch"]) == ({"earlier": None}, "one")
    with pytest.raises(RecipeError, match=r"two\.use: no slot reads its result"):
        plan("train.takes.watch=null", text=text)


OTHERS = "slots before it that return one: teacher, student"
SHAPE = "must name a slot for each artifact"
WRONG = {
    "{teachr: teacher}": "9:39: train.takes.teachr: `method.distil` takes no `teachr` "
    "(did you mean `teacher`?)",
    "{model: model}": "9:39: train.takes.model: `method.distil` takes no `model` "
    "(known here: engine, teacher, watch)",
    "{teacher: taecher}": "9:48: train.takes.teacher: there is no slot `taecher` "
    "(did you mean `teacher`?)",
    "{teacher: late}": "9:48: train.takes.teacher: slot `late` comes after this one "
    "(move slot `late` (r.yaml:10:3) before `train`)",
    "{teacher: model}": "9:48: train.takes.teacher: slot `model` (model.fake) returns ModelSource, "
    f"not the teacher (Engine) of `method.distil` ({OTHERS})",
    "{teacher: train}": "9:48: train.takes.teacher: slot `train` (method.distil) returns Scores, "
    f"not the teacher (Engine) of `method.distil` ({OTHERS})",
    "{teacher: null}": "9:48: train.takes.teacher: `method.distil` needs its teacher (Engine) "
    f"({OTHERS})",
    "[teacher]": f"9:38: train.takes: {SHAPE} "
    "(such as `takes: {engine: wrap}`; `pipe dag` shows what each slot reads)",
    "{teacher: 3}": f"9:38: train.takes: {SHAPE} "
    "(such as `takes: {engine: wrap}`; `pipe dag` shows what each slot reads)",
}


@pytest.mark.parametrize("takes", WRONG)
def test_mistakes(plan: Callable[..., Plan], takes: str) -> None:
    text = TAKES.replace("{teacher: teacher}", takes)
    text += "  late: {use: wrap.red}\n  use: {use: score.mine}\n"
    with pytest.raises(RecipeError) as refused:
        plan(text=text)
    assert [str(one) for one in refused.value.problems] == [f"r.yaml:{WRONG[takes]}"]


def test_a_misspelt_takes(plan: Callable[..., Plan]) -> None:
    with pytest.raises(RecipeError, match=r"train\.take: unknown field \(did you mean `takes`\?\)"):
        plan(text=TAKES.replace("takes:", "take:"))


DIGESTS = {
    "model": "9d94078035d94631",
    "data": "abf8661ff5f43837",
    "optimizer": "43deff3f9d615375",
    "wrap": "73934b05ec4e7ce7",
    "checkpoint": "47d984f968fd51ad",
    "train": "e60e1eeea466dae5",
}
"""Of version 0.1, which knew no `takes`."""


def test_settings_that_are_the_same_keep_their_digest(plan: Callable[..., Plan]) -> None:
    """A finished slot of an earlier version's run counts as finished."""
    text = """\
name: plain
stages:
  model: {use: model.fake, layers: 4}
  data: {use: data.text, files: [a.txt]}
  optimizer: {use: optimizer.adam}
  wrap: {use: wrap.red}
  checkpoint: {use: checkpoint.red}
  train: {use: train.lm, steps: 5}
"""
    found = digests(plan(text=text))
    assert {slot: digest[:16] for slot, digest in found.items()} == DIGESTS
    assert digests(plan("train.takes={checkpoints: checkpoint, engine: wrap}", text=text)) == found
    assert digests(plan("train.takes={checkpoints: null}", text=text))["train"] != found["train"]


def test_a_stage_between_that_is_not_known_is_not_passed_over(plan: Callable[..., Plan]) -> None:
    """Nothing is said of the train slot next to an engine that it does not get."""
    text = RECIPE.replace("wrap.blue", "wrap.blu")
    links = [
        SlotType(slot="teacher", use="wrap.red", kind=_Wrap),
        SlotType(slot="student", use="wrap.blu", kind=None),
        SlotType(slot="score", use="score.mine", kind=Score),
    ]
    assert wired(links).inputs["score"] == {"engine": None}
    links[1] = SlotType(slot="student", use="adapter.lroa", kind=None)
    assert wired(links).inputs["score"] == {"engine": "teacher"}
    with pytest.raises(RecipeError) as refused:
        plan(text=text)
    assert [one.key for one in refused.value.problems] == ["student.use"]


class _Model:
    def run(self, ctx: Context) -> ModelSource: ...


class _Adapter:
    def run(self, ctx: Context, model: ModelSource) -> ModelSource: ...


class _Optimizer:
    def run(self, ctx: Context) -> OptimizerPlan: ...


class _Wrap:
    def run(self, ctx: Context, model: ModelSource, optimizer: OptimizerPlan | None) -> Engine: ...


class _Average:
    def run(self, ctx: Context, engine: Engine) -> Engine: ...


KINDS = [_Model, _Adapter, _Optimizer, _Wrap, _Average, Score]


@given(st.lists(st.sampled_from(KINDS), max_size=10))
def test_wires_of_any_chain(kinds: list[type]) -> None:
    """Each parameter gets the latest earlier slot of its type, and readers are the reverse of
    producers."""
    links = [SlotType(slot=f"s{at}", use="", kind=kind) for at, kind in enumerate(kinds)]
    wires = wired(links)
    for at, link in enumerate(links):
        for artifact in (ModelSource, Engine, OptimizerPlan):
            takes = any(need.type is artifact for need in link.needs)
            able = [one.slot for one in links[:at] if one.gives is artifact]
            expected = able[-1] if takes and able else None
            assert wires.producer(link.slot, artifact) == expected
    for artifact, changes in ((ModelSource, _Adapter), (Engine, _Average)):
        for link in links:
            chain = [*wires.producers(link.slot, artifact)]
            assert all(wires.kinds[slot] is changes for slot in chain[:-1])
            assert all(link.slot in wires.readers(slot) for slot in chain)
    assert all(
        reader in wires.inputs and int(reader[1:]) > int(link.slot[1:])
        for link in links
        for reader in wires.readers(link.slot)
    )


def test_a_view_without_the_slots_that_have_mistakes(plan: Callable[..., Plan]) -> None:
    """Checks ask the view of a recipe with mistakes elsewhere too."""
    view = plan(text=TAKES).view
    train = view.slots["train"]
    assert view.producer(train, Engine) is view.slots["student"]
    assert [view.slot(one) for one in view.readers(view.slots["teacher"])] == ["score", "train"]
    assert (view.producer(train, ModelSource), view.producer(object(), Engine)) == (None, None)
    assert (view.slot(object()), [*view.readers(object())]) == ("", [])
    slots = {slot: one for slot, one in view.slots.items() if slot != "student"}
    less = type(view)(name="r", seed=0, procs=4, device="cpu", slots=slots, wiring=view.wiring)
    assert less.producer(train, Engine) is None
    assert [*less.producers(train, Engine)] == []
    assert less.data_ranks(train) == 4
