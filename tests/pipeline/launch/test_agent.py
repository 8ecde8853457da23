"""What a node does when it hears nothing of node 0, and what it reports of its own part."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest

from pipeline.distributed.settings import Timeouts
from pipeline.errors import RunFailed
from pipeline.execution.resume import ResumePlan
from pipeline.execution.run_spec import RunSpec
from pipeline.launch.agent import SILENCE, Agent
from pipeline.launch.messages import Beat, Place, Reply, Report
from pipeline.recipe import Launch
from pipeline.view.screen import Screen

BEAT = Beat(agent="x", run="r", node=1, host="h", procs=1, port=1)
PLACE = Place(first_rank=1, world_size=2, nodes=2, master="m", port=1)


@pytest.mark.parametrize(("own", "of_node_0"), [(3, 60), (60, 3), (10, 10)])
def test_node_0_says_how_long_it_may_be_silent(own: float, of_node_0: float) -> None:
    """A node with another value would end its ranks while the others wait for them."""
    settings: Any = Launch(timeouts=Timeouts(node=own))
    plan: Any = Record(recipe=Record(launch=settings, name="r"))
    node: Any = Record(host="m", port=1, node_rank=1, job="")
    agent = Agent(plan, node, lambda: None, Screen())
    reply = Reply(round=1, place=PLACE, lost_seconds=of_node_0)
    ranks: Any = Record(landmarks=lambda: 0)

    def obey(silence: float) -> None:
        link: Any = Record(beat=BEAT, reply=reply, silent_for=lambda: silence)
        agent._obey(link, reply, ranks, None)

    obey(SILENCE * of_node_0 - 0.1)
    with pytest.raises(RunFailed, match=f"no answer for {SILENCE * of_node_0:g} s"):
        obey(SILENCE * of_node_0 + 0.1)


def ran(
    agent: Agent, folder: Path, recipe: dict[str, Any], place: Place = PLACE, **spec: Any
) -> Report:
    """Return the report of a node whose run's folder has a recipe."""
    own = RunSpec(run_dir=str(folder), recipe=recipe, **spec)
    reply = Reply(round=1, place=place, spec=own.dump(), lost_seconds=10)
    link: Any = Record(beat=BEAT, reply=reply, address="127.0.0.1", silent_for=lambda: 0.0)
    return agent._run_round(link, reply, place)


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    """The agent of node 1 of a run whose folder has a sound recipe."""
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    view = Record(device="cpu")
    plan: Any = Record(recipe=Record(launch=Launch(), name="r"), per_node=1, view=view)
    node: Any = Record(host="m", port=1, node_rank=1, job="")
    return Agent(plan, node, lambda: None, Screen())


RECIPE: dict[str, Any] = {"name": "r", "stages": {"model": {"use": "model.hf"}}}


@pytest.mark.parametrize(
    ("file", "content", "first_rank", "words"),
    [
        ("recipe.yaml", "name: [", 1, "recipe.yaml"),
        ("recipe.yaml", "name: other", 1, "node 0 runs another recipe"),
        ("recipe.yaml", None, 1, "is not to be seen here"),
        ("journal.jsonl", "{]\n", 0, "line 1 is not as it was written"),
    ],
)
def test_what_keeps_a_node_from_its_round_is_reported(
    agent: Agent, tmp_path: Path, file: str, content: str | None, first_rank: int, words: str
) -> None:
    """The others would wait for a node that ends without a word."""
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    place = Place(first_rank=first_rank, world_size=2, nodes=2, master="m", port=1)
    agent.plan.__dict__["slots"] = ()
    report = ran(agent, tmp_path, RECIPE, place)
    assert (report.kind, report.restart) == ("raised", "never")
    assert report.text.startswith("node 1 (h): ")
    assert words in report.text


def test_a_system_that_refuses_is_reported(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("pipeline.execution.rundir.require_safe", refuses)
    assert ran(agent, tmp_path, RECIPE).text == f"node 1 (h): Permission denied: {tmp_path}"
    monkeypatch.setattr("pipeline.execution.rundir.require_safe", lambda _: None)
    monkeypatch.setattr("pipeline.launch.ranks.start_child", refuses)
    text = f"node 1 (h): the processes could not be started: Permission denied: {tmp_path}"
    assert ran(agent, tmp_path, RECIPE).text == text


def test_the_first_round_does_what_node_0_has_found_at_the_start(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that have finished are read once, which can take many minutes."""
    place = Place(first_rank=0, world_size=2, nodes=2, master="m", port=1)
    again = ResumePlan(run=frozenset({"model"}), restore={})
    agent.left = ResumePlan(run=frozenset({"train"}), restore={"model": {}})
    begun: list[RunSpec] = []

    def begin(module: str, message: Any, *shown: str, **options: Any) -> None:
        begun.append(RunSpec(**message["spec"]))
        raise ZeroDivisionError

    monkeypatch.setattr("pipeline.launch.agent.plan_resume", lambda *_: again)
    monkeypatch.setattr("pipeline.launch.ranks.start_child", begin)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            ran(agent, tmp_path, RECIPE, place)
    assert [(one.todo, one.restore) for one in begun] == [
        (("train",), {"model": {}}), (("model",), {}),
    ]  # fmt: skip
