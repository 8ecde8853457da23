"""The conformance suite: it passes a good stage, and names each fault of a bad one."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.testing import assert_conforms, check_stage, conformance, context, plan_view, problems
from tests.support.plugins import install

GOOD = '''
    from collections.abc import Iterator, Mapping
    from dataclasses import dataclass, field
    from pathlib import Path
    from typing import Annotated, Any

    from pydantic import Field

    from pipeline.contracts.model import ModelSource
    from pipeline.contracts.optimizer import OptimizerPlan
    from pipeline.errors import Problem
    from pipeline.planning.planner import Planner
    from pipeline.contracts.plan_view import PlanView
    from pipeline.contracts.stage import Context


    @dataclass(frozen=True, kw_only=True)
    class Inner:
        """Settings within settings."""

        depth: Annotated[int, Field(ge=0)] = 0
        """How deep."""


    @dataclass(frozen=True, kw_only=True)
    class Thing:
        """Do a thing."""

        size: Annotated[int, Field(ge=1)]
        """How big."""
        inner: Inner | None = None
        """More settings."""
        where: Path = Path("here")
        """A place."""
        names: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
        """Some names."""

        def check(self, plan: PlanView) -> Iterator[Problem]:
            if self.size == 13:
                yield Problem(key="size", message="brings bad luck")
            if self.inner and self.inner.depth > self.size:
                yield Problem(key="inner.depth", message="is deeper than it is big")

        def run(self, ctx: Context, model: ModelSource | None) -> OptimizerPlan:
            raise AssertionError("never run")


    class ThingPlanner(Planner):
        """Offers strategies."""

        @classmethod
        def presets(cls) -> Mapping[str, Any]:
            return {}
'''
VALID = {"size": 3, "inner": {"depth": 2}, "names": {"a": [1, 2]}}
COUNT = itertools.count()

Make = Callable[..., type]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Install the good stage with a part of its source replaced, and return its class."""
    monkeypatch.syspath_prepend(tmp_path)

    def made(old: str = "", new: str = "", *, names: Sequence[str] = ("optimizer.thing",)) -> type:
        source = textwrap.dedent(GOOD)
        assert not old or source.count(old) == 1
        module = f"made_{next(COUNT)}"  # a module is imported once, even if its file changes later
        points = dict.fromkeys(names, "Thing")
        planners = dict.fromkeys(names, "ThingPlanner")
        changed = source.replace(old, new) if old else source
        install(tmp_path, "acme", module, changed, points, planners)
        stage: type = importlib.import_module(module).Thing
        return stage

    return made


def test_a_good_stage(make: Make) -> None:
    invalid = [
        ("size", {}),
        ("size", {"size": 0}),
        ("size", {"size": 13}),
        ("inner.depth", {"size": 1, "inner": {"depth": 2}}),
        ("inner.depth", {"size": 1, "inner": {"depth": -1}}),
        ("inner.deep", {"size": 1, "inner": {"deep": 1}}),
        ("names.a.0", {"size": 1, "names": {"a": ["x"]}}),
    ]
    stage = make()
    assert check_stage(stage, valid=VALID, invalid=invalid) == []
    assert_conforms(stage, valid=VALID, invalid=invalid)


WHERE = 'where: Path = Path("here")'
MODEL = "model: ModelSource | None"
SIZE = "if self.size == 13:"
FROZEN = "(frozen=True, kw_only=True)\nclass Thing"
FAULTS = [
    ('    """How deep."""\n', "",
     "field `inner.depth` has no string under it that says what it is"),
    ("depth: Annotated[int, Field(ge=0)] = 0", "depth: Annotated[int, Field(ge=0)] = -1",
     "the default of field `inner.depth` is refused: must be at least 0, not `-1`"),
    (WHERE, "where: Annotated[int, Field(lt=5)] = 9",
     "the default of field `where` is refused: must be less than 5, not `9`"),
    (WHERE, "where: bool = None",
     "the default of field `where` is refused: must be true or false, not `null`"),
    (WHERE, "where: Any = object",
     "the default of field `where` cannot be written in a recipe: Object of type type is not "
     "JSON serializable"),
    (WHERE, "where: ModelSource | None = None",
     "field `where`: the type ModelSource cannot be written in a recipe (use numbers, texts, "
     "lists, mappings, dataclasses)"),
    (WHERE, 'where: frozenset[str] = frozenset({"here"})',
     "its values have no stable JSON form: expected str, bytes or os.PathLike object, not "
     "frozenset"),
    ("ctx: Context,", "ctx,",
     "run: the first parameter after `self` is not annotated with Context"),
    (") -> OptimizerPlan:", "):",
     "run: its return annotation is missing (write the class that it returns, or `-> None`)"),
    (MODEL, "model: int", "run: `model` is of the type int, which says nothing of its role"),
    (MODEL, "model: Any", "run: parameter `model` is not annotated with one artifact class"),
    (MODEL, "model: ModelSource | OptimizerPlan",
     "Thing.run: parameter `model` is not annotated with one artifact class"),
    (MODEL, "*model: ModelSource", "run: `model` cannot be given by name"),
    (SIZE, "if 1 / (self.size - 3):",
     "check raised ZeroDivisionError instead of yielding a Problem: division by zero, at /"),
    (SIZE, "if self.size == 3:", "check refuses valid fields: size: brings bad luck"),
    ('yield Problem(key="size", message="brings bad luck")', "pass\n        yield 'no'",
     "check yields str instead of Problem"),
    ("return {}", "from pipeline.planning.planner import Preset; return {'big': Preset()}",
     "has presets, which are for stages that give an Engine"),
    ("return {}",
     "import pipeline.planning.planner as s; return {'big': s.Preset(fields={'size': 0})}",
     "its preset `big` is refused: size: must be at least 1, not `0`"),
    ('    """Do a thing."""\n', "", "has no docstring"),
    (FROZEN, "(kw_only=True)\nclass Thing", "is not a frozen dataclass"),
    (FROZEN, "(frozen=True, kw_only=True, eq=False)\nclass Thing",
     "is not equal to a stage of the same values"),
    ("from pydantic import Field", "import accelerate\nfrom pydantic import Field",
     "importing it imports accelerate, torch (import them inside run)"),
    (SIZE, "import torch\n        if self.size == 13:",
     "checking it imports torch (import them inside run)"),
]  # fmt: skip


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no process that looks for imports."""
    monkeypatch.setattr(conformance, "import_violations", lambda value, configs: [])


@pytest.mark.parametrize(("old", "new", "expected"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_a_fault_is_named(
    old: str, new: str, expected: str, make: Make, request: pytest.FixtureRequest
) -> None:
    if "imports" not in expected:
        request.getfixturevalue("no_process")
    found = check_stage(make(old, new), valid=VALID)
    assert any(expected in each for each in found), found


@pytest.mark.usefixtures("no_process")
def test_all_violations_are_told_at_once(make: Make) -> None:
    stage = make("size: Annotated[int, Field(ge=1)]", "size: int = 0.5")
    with pytest.raises(AssertionError) as caught:
        assert_conforms(
            stage, valid=VALID, invalid=[("size", {"size": 4}), ("names", {"size": 13})]
        )
    assert str(caught.value).splitlines() == [
        f"{stage.__module__}.Thing:",
        "- the default of field `size` is refused: must be a whole number, not `0.5`",
        "- invalid fields are accepted: {'size': 4}",
        "- {'size': 13} has no problem at `names`, but: size: brings bad luck",
    ]


def test_valid_fields_that_are_refused(make: Make) -> None:
    assert check_stage(make()) == ["valid fields are refused: size: is required"]


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("thing", "its name `thing` is not kind.name in lower-case letters, digits and "
         "underscores"),
        ("Optimizer.x", "its name `Optimizer.x` is not kind.name in lower-case letters, digits and "
         "underscores"),
        ("wrap.thing", "wrap.thing returns OptimizerPlan; stages of kind wrap return Engine"),
        ("callback.thing", "callback.thing returns OptimizerPlan; stages of kind callback return "
         "StepCallback"),
    ],
)  # fmt: skip
def test_names(make: Make, name: str, expected: str) -> None:
    assert check_stage(make(names=[name]), valid=VALID) == [expected]


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("names", [["schedule.thing"], ["optimizer.one", "optimizer.two"]])
def test_new_kinds_and_second_names_are_fine(make: Make, names: list[str]) -> None:
    assert check_stage(make(names=names), valid=VALID) == []


def test_a_stage_that_is_not_registered(make: Make, tmp_path: Path) -> None:
    stage = make()
    (tmp_path / "acme-1.0.dist-info" / "entry_points.txt").unlink()
    assert check_stage(stage, valid=VALID) == [
        "no entry point of the group `pipe.stages` leads to it "
        "(add it to pyproject.toml, then `pip install -e .` again)"
    ]


@pytest.mark.usefixtures("no_process")
def test_a_name_that_another_package_has_too(make: Make) -> None:
    assert check_stage(make(names=["wrap.ddp"]), valid=VALID) == [
        "stage `wrap.ddp` is registered by acme 1.0 and pipetrain 0.1.0 (uninstall one of them)"
    ]


def test_problems_are_those_of_the_slot(make: Make) -> None:
    stage = make("if self.size == 13:", "if self.size == plan.procs:")
    assert problems(stage, {"size": 4}) == []
    (found,) = problems(stage, {"size": 4}, plan=plan_view(procs=4))
    assert (found.key, found.message) == ("size", "brings bad luck")
    (found,) = problems(stage, {"sise": 4, "size": 4})
    assert (found.key, found.hint) == ("sise", "did you mean `size`?")


def test_context(tmp_path: Path) -> None:
    ctx = context(tmp_path / "run", seed=3)
    ctx.metrics.write_training({"step": 1, "loss": 2.5})
    assert (ctx.run_dir, ctx.seed) == (tmp_path / "run", 3)
    assert (ctx.dist.rank, ctx.dist.world_size, ctx.dist.device.type) == (0, 1, "cpu")
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text("utf-8")) == {
        "step": 1,
        "loss": 2.5,
    }


def test_it_needs_no_test_runner_and_no_torch() -> None:
    program = "import sys, pipeline.testing; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"pytest", "hypothesis", "torch", "numpy"} & set(done.stdout.split())
