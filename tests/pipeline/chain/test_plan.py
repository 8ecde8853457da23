"""Validated stages and the chain of their artifacts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from pipeline.chain import plan as plan_module
from pipeline.chain.plan import Plan, make_plan
from pipeline.chain.registry import Registry
from pipeline.contracts.callbacks import StepCallback
from pipeline.contracts.engine import Engine
from pipeline.contracts.stage import Context
from pipeline.contracts.training import TrainedRun
from pipeline.distributed.settings import ProcessCounts
from pipeline.errors import Problem, RecipeError
from pipeline.recipe import load_recipe
from tests.pipeline.chain.conftest import Planned

RECIPE = """\
name: good
seed: 3
launch: {device: cpu}
stages:
  model: {use: model.fake, layers: 4}
  data: {use: data.text, files: [a.txt, b.txt]}
  optimizer: {use: optimizer.adam, lr: 1, betas: [0.5, 0.9]}
  wrap: {use: wrap.red, offload: {device: cpu}}
  checkpoint: {use: checkpoint.red}
  train: {use: train.lm, steps: 5}
"""
SLOTS = ["model", "data", "optimizer", "wrap", "checkpoint", "train"]
AVERAGE = "  average: {use: average.mine}\n"


@dataclass(frozen=True, kw_only=True)
class Watch:
    """A callback."""

    def run(self, ctx: Context) -> StepCallback:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Train, with a callback if there is one."""

    def run(self, ctx: Context, engine: Engine, callback: StepCallback | None) -> TrainedRun:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class Average:
    """Takes an engine and returns one."""

    def run(self, ctx: Context, engine: Engine) -> Engine:
        raise AssertionError("never run")


@pytest.fixture
def plan(planned: Planned) -> Callable[..., Plan]:
    own = {"callback.mine": Watch, "train.watched": Watched, "average.mine": Average}

    def make(*overrides: str, text: str = RECIPE, **how: object) -> Plan:
        return planned(*overrides, text=text, stages=own, **how)

    return make


@pytest.fixture
def problem(plan: Callable[..., Plan]) -> Callable[..., Problem]:
    """Return a function that returns the only problem of a recipe."""

    def find(*overrides: str, **how: object) -> Problem:
        with pytest.raises(RecipeError) as refused:
            plan(*overrides, **how)
        (found,) = refused.value.problems
        return found

    return find


def test_stages_are_typed_instances(plan: Callable[..., Plan]) -> None:
    made = plan("launch.procs=3")
    stages = {step.slot: step.stage for step in made.slots}
    assert list(stages) == list(made.view.slots) == SLOTS
    assert stages["model"].layers == 4
    assert stages["data"].files == (Path("a.txt"), Path("b.txt"))
    assert stages["optimizer"].betas == (0.5, 0.9)
    assert type(stages["wrap"].offload).__name__ == "Offload"
    assert stages["wrap"].offload.pin is True
    assert stages["wrap"].stage == 2
    view = made.view
    assert (view.name, view.seed, view.procs, view.device) == ("good", 3, 3, "cpu")


def test_inputs_and_their_last_readers(plan: Callable[..., Plan]) -> None:
    made = plan()
    assert {step.slot: dict(step.inputs) for step in made.slots} == {
        "model": {},
        "data": {"model": "model"},
        "optimizer": {"model": "model"},
        "wrap": {"model": "model", "optimizer": "optimizer"},
        "checkpoint": {"engine": "wrap"},
        "train": {"engine": "wrap", "data": "data", "checkpoints": "checkpoint"},
    }
    last = ["wrap", "train", "wrap", "train", "train", None]
    assert [made.last_reader(slot) for slot in SLOTS] == last
    # an optional need may stay open, and a chain without an end is no mistake yet
    assert plan("checkpoint=null").slots[-1].inputs["checkpoints"] is None
    assert (made.warnings, plan("train=null").warnings) == ((), ())


SECOND = {
    "model": ("  data:", "  base: {use: model.fake}\n  data:"),
    "data": ("  optimizer:", "  more: {use: data.text, files: [c.txt]}\n  optimizer:"),
    "optimizer": ("  wrap:", "  again: {use: optimizer.adam}\n  wrap:"),
    "wrap": ("  checkpoint:", "  zero: {use: wrap.red}\n  checkpoint:"),
    "checkpoint": ("  train:", "  other: {use: checkpoint.red}\n  train:"),
}
"""A second slot of each kind, after the first, which then nobody reads."""


@pytest.mark.parametrize("slot", list(SECOND))
def test_two_slots_that_give_the_same(problem: Callable[..., Problem], slot: str) -> None:
    first, second = SECOND[slot]
    text = RECIPE.replace(first, second)
    other = second.split(":")[0].strip()
    found = problem(text=text)
    place, other_place = (text[: text.index(f"  {o}: ")].count("\n") + 1 for o in (slot, other))
    assert (found.key, found.location and found.location.line) == (f"{slot}.use", place)
    assert found.message.startswith("no slot reads its result")
    assert f"slot `{other}` (" in found.message
    assert f"r.yaml:{other_place}:" in found.message
    assert f"`{slot}: null` or `{other}: null`" in found.hint


def test_a_slot_after_its_readers(
    plan: Callable[..., Plan], problem: Callable[..., Problem]
) -> None:
    late = problem(text=f"{RECIPE}  late: {{use: optimizer.adam}}\n")
    assert (late.key, late.message.partition(" (")[0]) == (
        "late.use", "no slot reads its result: slot `optimizer`",
    )  # fmt: skip
    # an optional slot after its only reader
    train, callback = "  fit: {use: train.watched}\n", "  watch: {use: callback.mine}\n"
    before = RECIPE.partition("  data:")[0] + "  optimizer: {use: optimizer.adam}\n"
    before += "  wrap: {use: wrap.red}\n"
    assert plan(text=before + callback + train).warnings == ()
    found = problem(text=before + train + callback)
    assert found.message.startswith("no slot reads its result: slot `fit` (train.watched, ")
    assert (found.key, found.hint) == ("watch.use", "move it before slot `fit`")


def test_a_stage_of_a_third_party_that_changes_what_it_takes(
    plan: Callable[..., Plan], problem: Callable[..., Problem]
) -> None:
    """The stage around an engine may hold the engine, so it stays open when that stage has run."""
    assert problem(text=RECIPE + AVERAGE).message.startswith(
        "no slot reads its result: slot `wrap`"
    )
    around = partial(plan, text=RECIPE.replace("  train:", f"{AVERAGE}  train:"))
    made = around()
    assert made.warnings == ()
    last = [made.last_reader(slot) for slot in ("wrap", "average", "model")]
    assert last == ["train", "train", "wrap"]
    assert [*made.view.wiring.readers("wrap")] == ["checkpoint", "average", "train"]
    assert [*made.view.wiring.producers("train", Engine)] == ["average", "wrap"]
    assert around("train=null").last_reader("wrap") == "average"


@pytest.mark.parametrize(
    ("launch", "gpus", "decided"),
    [
        ("{}", 0, ("cpu", 1)),
        ("{}", 4, ("cuda", 4)),
        ("{device: cpu}", 4, ("cpu", 1)),
        ("{device: cuda}", 0, ("cuda", 1)),
        ("{device: cuda, procs: 2}", 8, ("cuda", 2)),
    ],
)
def test_device_and_processes(
    plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    launch: str,
    gpus: int,
    decided: tuple[str, int],
) -> None:
    monkeypatch.setattr(plan_module, "gpu_count", lambda: gpus)
    view = plan(text=RECIPE.replace("{device: cpu}\nstages", f"{launch}\nstages")).view
    assert (view.device, view.procs) == decided


def test_processes_that_a_launcher_decided(plan: Callable[..., Plan]) -> None:
    made = plan("launch.procs=2", started=ProcessCounts(procs=16, per_node=2))
    assert (made.view.procs, made.per_node) == (16, 2)
    nodes = plan("launch.procs=2", "launch.nodes=4")
    assert (nodes.view.procs, nodes.per_node) == (8, 2)


@pytest.mark.parametrize(
    ("launch", "procs"),
    [
        (["launch.workers=6"], 6), (["launch.workers={min: 2, max: 8}"], 8), ([], 1),
        (["launch.procs=2", "launch.nodes=3"], 6),
    ],
)  # fmt: skip
def test_workers_of_an_engine(plan: Callable[..., Plan], launch: list[str], procs: int) -> None:
    assert plan("launch.engine=ray", *launch).view.procs == procs


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (["launch.workers=2"], "workers and resources_per_worker are an engine's (engine: ray)"),
        (["launch.engine=ray", "launch.workers=2", "launch.procs=2"], "leave out procs and nodes"),
        (["launch.engine=ray", "launch.workers={min: 4, max: 2}"], "min is 4, but max is 2"),
    ],
)
def test_workers_that_contradict(
    problem: Callable[..., Problem], launch: list[str], words: str
) -> None:
    assert words in str(problem(*launch))


def test_a_launcher_starts_no_engine(problem: Callable[..., Problem]) -> None:
    found = problem("launch.engine=ray", for_this_machine=True, started=ProcessCounts(procs=2))
    assert found.key == "launch.engine"
    assert "it starts all ranks, and so does a launcher" in str(found)


def test_cuda_is_asked_for_where_there_is_none(
    problem: Callable[..., Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "gpu_count", lambda: 0)
    found = problem("launch.device=cuda", for_this_machine=True)
    assert (found.key, found.message) == ("launch.device", "this machine has no CUDA device")


def problems_on_8_gpus(folder: Path, launch: str, started: ProcessCounts) -> dict[str, Problem]:
    path, none = folder / "recipe.yaml", Registry([])
    path.write_text(f"name: x\nlaunch: {{{launch}}}\nstages: {{}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "gpu_count", lambda: 8)
        with pytest.raises(RecipeError) as caught:
            make_plan(load_recipe(path), registry=none, for_this_machine=True, started=started)
    return {problem.key: problem for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("launch", "started", "key", "words"),
    [
        (
            "device: cuda, procs: 16", ProcessCounts(), "procs",
            "16 processes on each node, but this machine has 8 GPUs (set launch.procs=8 and "
            "launch.nodes, or null to take as many as there are)",
        ),
        (
            "device: cpu, procs: 2", ProcessCounts(procs=1), "procs",
            "2 processes, but the launcher started 1 (set launch.procs=1, or null to take as many "
            "as are started)",
        ),
        (
            "device: cpu, procs: 2, nodes: 2", ProcessCounts(procs=6, per_node=3), "procs",
            "2 processes on each node, but the launcher started 3 (set launch.procs=3, or null to "
            "take as many as are started)",
        ),
        (
            "device: cpu, procs: 2, nodes: 2", ProcessCounts(procs=6, per_node=2), "nodes",
            "2 nodes, but 3 nodes were started (set launch.nodes=3, or null to take as many as "
            "there are)",
        ),
        (
            "device: cpu, nodes: 8", ProcessCounts(), "nodes",
            "8 nodes, but this is one (on every node: pipe run RECIPE --nodes NODES --node-rank "
            "NUMBER --rdzv HOST:PORT, or have `pipe launch` write a script; or set launch.nodes=1)",
        ),
    ],
)  # fmt: skip
def test_what_was_started_and_the_recipe_agree(
    tmp_path: Path, launch: str, started: ProcessCounts, key: str, words: str
) -> None:
    problem = problems_on_8_gpus(tmp_path, launch, started)[f"launch.{key}"]
    assert str(problem).endswith(f": launch.{key}: {words}")


@pytest.mark.parametrize(
    "started",
    [
        ProcessCounts(procs=16, per_node=8),
        ProcessCounts(nodes=2),
        ProcessCounts(procs=16),
    ],
)
def test_what_was_started_as_the_recipe_says(tmp_path: Path, started: ProcessCounts) -> None:
    found = problems_on_8_gpus(tmp_path, "procs: 8, nodes: 2", started)
    assert [*found] == ["stages"]
