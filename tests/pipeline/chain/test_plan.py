"""Validated stages and the chain of their artifacts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.chain import plan as plan_module
from pipeline.chain.entry_points import Entry
from pipeline.chain.plan import Plan, make_plan
from pipeline.chain.registry import Registry
from pipeline.contracts.callbacks import StepCallback
from pipeline.contracts.engine import Engine
from pipeline.contracts.stage import Context
from pipeline.contracts.training import TrainedRun
from pipeline.distributed.launch import LaunchInfo
from pipeline.errors import RecipeError
from pipeline.hardware.gpus import gpu_count
from pipeline.recipe import load_recipe

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


@pytest.fixture
def planned(registry: Registry, tmp_path: Path) -> Callable[..., Plan]:
    def make(*overrides: str, text: str = RECIPE, **how: object) -> Plan:
        (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
        recipe = load_recipe(tmp_path / "r.yaml", overrides)
        return make_plan(recipe, registry=registry, **how)  # type: ignore[arg-type]

    return make


def test_stages_are_typed_instances(planned: Callable[..., Plan]) -> None:
    stages = {step.slot: step.stage for step in planned().slots}
    assert list(stages) == ["model", "data", "optimizer", "wrap", "checkpoint", "train"]
    assert stages["model"].layers == 4
    assert stages["data"].files == (Path("a.txt"), Path("b.txt"))
    assert stages["optimizer"].betas == (0.5, 0.9)
    assert type(stages["wrap"].offload).__name__ == "Offload"
    assert stages["wrap"].offload.pin is True
    assert stages["wrap"].stage == 2


def test_inputs_come_from_the_slots_that_give_them(planned: Callable[..., Plan]) -> None:
    inputs = {step.slot: dict(step.inputs) for step in planned().slots}
    assert inputs == {
        "model": {},
        "data": {"model": "model"},
        "optimizer": {"model": "model"},
        "wrap": {"model": "model", "optimizer": "optimizer"},
        "checkpoint": {"engine": "wrap"},
        "train": {"engine": "wrap", "data": "data", "checkpoints": "checkpoint"},
    }


def test_the_latest_earlier_slot_wins(planned: Callable[..., Plan]) -> None:
    text = RECIPE.replace("  optimizer:", "  adapter: {use: model.fake}\n  optimizer:")
    inputs = {step.slot: step.inputs for step in planned(text=text).slots}
    assert (inputs["data"]["model"], inputs["wrap"]["model"]) == ("model", "adapter")


SECOND = {
    "model": ("  data:", "  base: {use: model.fake}\n  data:"),
    "data": ("  optimizer:", "  more: {use: data.text, files: [c.txt]}\n  optimizer:"),
    "optimizer": ("  wrap:", "  again: {use: optimizer.adam}\n  wrap:"),
    "wrap": ("  checkpoint:", "  zero: {use: wrap.red}\n  checkpoint:"),
    "checkpoint": ("  train:", "  other: {use: checkpoint.red}\n  train:"),
}
"""A second slot of each kind, behind the first, which then nobody reads."""


@pytest.mark.parametrize("slot", list(SECOND))
def test_two_slots_that_give_the_same(planned: Callable[..., Plan], slot: str) -> None:
    first, second = SECOND[slot]
    text = RECIPE.replace(first, second)
    other = second.split(":")[0].strip()
    with pytest.raises(RecipeError) as refused:
        planned(text=text)
    [problem] = refused.value.problems
    lines = text.splitlines()
    places = [
        next(at for at, line in enumerate(lines, 1) if line.startswith(f"  {name}: "))
        for name in (slot, other)
    ]
    assert (problem.key, problem.location and problem.location.line) == (f"{slot}.use", places[0])
    assert problem.message.startswith("no slot reads its result")
    assert f"slot `{other}` (" in problem.message
    assert f"r.yaml:{places[1]}:" in problem.message
    assert f"`{slot}: null` or `{other}: null`" in problem.hint


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


def test_an_optional_slot_after_its_only_reader(
    fake_entry: Callable[..., Entry], registry: Registry, tmp_path: Path
) -> None:
    import fake_stages

    fake_stages.Watch, fake_stages.Watched = Watch, Watched
    entries = fake_entry("callback.mine", "Watch"), fake_entry("train.watched", "Watched")
    known = Registry([*registry.entries(), *entries])
    train, callback = "  fit: {use: train.watched}\n", "  watch: {use: callback.mine}\n"
    before = RECIPE.partition("  data:")[0] + "  optimizer: {use: optimizer.adam}\n"
    before += "  wrap: {use: wrap.red}\n"
    file = tmp_path / "r.yaml"
    file.write_text(before + callback + train)
    assert make_plan(load_recipe(file), registry=known).warnings == ()
    file.write_text(before + train + callback)
    with pytest.raises(RecipeError) as refused:
        make_plan(load_recipe(file), registry=known)
    [problem] = refused.value.problems
    assert problem.message.startswith("no slot reads its result: slot `fit` (train.watched, ")
    assert (problem.key, problem.hint) == ("watch.use", "move it before slot `fit`")


def test_a_slot_behind_its_reader(planned: Callable[..., Plan]) -> None:
    text = RECIPE + "  late: {use: optimizer.adam}\n"
    with pytest.raises(RecipeError, match=r"late\.use: no slot reads its result: slot `optimizer`"):
        planned(text=text)


@dataclass(frozen=True, kw_only=True)
class Average:
    """Takes an engine and gives one, of a package of its own."""

    def run(self, ctx: Context, engine: Engine) -> Engine:
        raise AssertionError("never run")


def test_a_stage_of_a_third_party_that_changes_what_it_takes(
    fake_entry: Callable[..., Entry], registry: Registry, tmp_path: Path
) -> None:
    import fake_stages

    fake_stages.Average = Average
    entry = fake_entry("average.mine", "Average", "somebody")
    known = Registry([*registry.entries(), entry])

    def plan(text: str) -> Plan:
        (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
        return make_plan(load_recipe(tmp_path / "r.yaml"), registry=known)

    average = "  average: {use: average.mine}\n"
    assert plan(RECIPE.replace("  train:", f"{average}  train:")).warnings == ()
    with pytest.raises(RecipeError, match=r"average.*no slot reads its result: slot `wrap`"):
        plan(RECIPE + average)


def test_a_result_that_nobody_reads_and_nobody_else_gives(planned: Callable[..., Plan]) -> None:
    assert planned().warnings == ()
    found = planned("train=null").warnings
    assert found == ()  # the chain leads nowhere yet


def test_an_optional_need_may_stay_open(planned: Callable[..., Plan]) -> None:
    plan = planned("checkpoint=null")
    assert plan.slots[-1].inputs["checkpoints"] is None


def test_last_readers(planned: Callable[..., Plan]) -> None:
    plan = planned()
    last = {step.slot: plan.last_reader(step.slot) for step in plan.slots}
    assert last == {
        "model": "wrap",
        "data": "train",
        "optimizer": "wrap",
        "wrap": "train",
        "checkpoint": "train",
        "train": None,
    }


def test_who_reads_what_an_artifact_was_made_into_reads_it_too(
    fake_entry: Callable[..., Entry], registry: Registry, tmp_path: Path
) -> None:
    """The stage around an engine may hold the engine, so it stays open when that stage has run."""
    import fake_stages

    fake_stages.Average = Average
    known = Registry([*registry.entries(), fake_entry("average.mine", "Average", "somebody")])
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE.replace("  train:", "  around: {use: average.mine}\n  train:"))
    plan = make_plan(load_recipe(file), registry=known)
    last = {step.slot: plan.last_reader(step.slot) for step in plan.slots}
    assert (last["wrap"], last["around"], last["model"]) == ("train", "train", "wrap")
    assert [*plan.view.wiring.readers("wrap")] == ["checkpoint", "around", "train"]
    assert [*plan.view.wiring.producers("train", Engine)] == ["around", "wrap"]
    unread = make_plan(load_recipe(file, ["train=null"]), registry=known)
    assert unread.last_reader("wrap") == "around"


def test_the_view(planned: Callable[..., Plan]) -> None:
    view = planned("launch.procs=3").view
    assert (view.name, view.seed, view.procs, view.device) == ("good", 3, 3, "cpu")
    assert list(view.slots) == ["model", "data", "optimizer", "wrap", "checkpoint", "train"]


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
    planned: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    launch: str,
    gpus: int,
    decided: tuple[str, int],
) -> None:
    monkeypatch.setattr(plan_module, "gpu_count", lambda: gpus)
    view = planned(text=RECIPE.replace("{device: cpu}\nstages", f"{launch}\nstages")).view
    assert (view.device, view.procs) == decided


def test_processes_that_a_launcher_decided(planned: Callable[..., Plan]) -> None:
    plan = planned("launch.procs=2", started=LaunchInfo(procs=16, per_node=2))
    assert (plan.view.procs, plan.per_node) == (16, 2)
    elastic = planned("launch.procs=2", "launch.nodes={min: 1, max: 4}")
    assert (elastic.view.procs, elastic.per_node) == (8, 2)


def test_cuda_is_asked_for_where_there_is_none(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "gpu_count", lambda: 0)
    assert planned("launch.device=cuda").view.device == "cuda"
    with pytest.raises(RecipeError, match=r"launch\.device: this machine has no CUDA device"):
        planned("launch.device=cuda", for_this_machine=True)


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    assert gpu_count(tmp_path, {}) == 0
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert gpu_count(tmp_path, {}) == 3
    driver = tmp_path / "proc/driver/nvidia/gpus"
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (driver / name).mkdir(parents=True)
    assert gpu_count(tmp_path, {}) == 2
    chosen = {"": 0, "-1": 0, "0": 1, "0,1": 2, "0,1,2": 2, "0,-1,1": 1, "GPU-abc": 1}
    for visible, count in chosen.items():
        assert gpu_count(tmp_path, {"CUDA_VISIBLE_DEVICES": visible}) == count


@pytest.mark.parametrize(
    ("launch", "started", "key", "words"),
    [
        (
            "device: cuda, procs: 16", LaunchInfo(), "procs",
            "16 processes on each node, but this machine has 8 GPUs (set launch.procs=8 and "
            "launch.nodes, or null to take as many as there are)",
        ),
        (
            "device: cpu, procs: 2", LaunchInfo(procs=1), "procs",
            "2 processes, but the launcher started 1 (set launch.procs=1, or null to take as many "
            "as are started)",
        ),
        (
            "device: cpu, procs: 2, nodes: 2", LaunchInfo(procs=6, per_node=3), "procs",
            "2 processes on each node, but the launcher started 3 (set launch.procs=3, or null to "
            "take as many as are started)",
        ),
        (
            "device: cpu, procs: 2, nodes: 2", LaunchInfo(procs=6, per_node=2), "nodes",
            "2 nodes, but 3 nodes were started (set launch.nodes=3, or null to take as many as "
            "there are)",
        ),
        (
            "device: cpu, nodes: {min: 2, max: 4}", LaunchInfo(nodes=5), "nodes",
            "2 to 4 nodes, but 5 nodes were started (set launch.nodes=5, or null to take as many "
            "as there are)",
        ),
        (
            "device: cpu, nodes: 8", LaunchInfo(), "nodes",
            "8 nodes, but this is one (on every node: pipe run RECIPE --nodes NODES --node-rank "
            "NUMBER --rdzv HOST:PORT, or have `pipe launch` write a script; or set launch.nodes=1)",
        ),
    ],
)  # fmt: skip
def test_what_was_started_and_the_recipe_agree(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launch: str,
    started: LaunchInfo,
    key: str,
    words: str,
) -> None:
    monkeypatch.setattr("pipeline.chain.plan.gpu_count", lambda: 8)
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: x\nlaunch: {{{launch}}}\nstages: {{}}\n")
    with pytest.raises(RecipeError) as caught:
        make_plan(load_recipe(path), registry=Registry([]), for_this_machine=True, started=started)
    problem = next(p for p in caught.value.problems if p.key == f"launch.{key}")
    assert str(problem).endswith(f": launch.{key}: {words}")


@pytest.mark.parametrize(
    "started",
    [
        LaunchInfo(procs=16, per_node=8),
        LaunchInfo(nodes=2),
        LaunchInfo(procs=16),
        LaunchInfo(procs=8, nodes=1),
    ],
)
def test_what_was_started_as_the_recipe_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: LaunchInfo
) -> None:
    monkeypatch.setattr("pipeline.chain.plan.gpu_count", lambda: 8)
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nlaunch: {procs: 8, nodes: {min: 1, max: 2}}\nstages: {}\n")
    with pytest.raises(RecipeError) as caught:
        make_plan(load_recipe(path), registry=Registry([]), for_this_machine=True, started=started)
    assert [problem.key for problem in caught.value.problems] == ["stages"]
