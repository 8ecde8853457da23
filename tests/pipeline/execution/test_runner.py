"""Stages that run, their inputs, the release of artifacts, the work that a journal saves; and ranks
whose recipes differ."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.chain.plan import Plan, PlannedSlot, plan_file
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.metrics import Metrics
from pipeline.contracts.plan_view import Wiring
from pipeline.contracts.signature import gives
from pipeline.contracts.stage import Context, Durable, ResourceNeed
from pipeline.contracts.training import Checkpoints, TrainedRun
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from pipeline.execution.journal import Journal
from pipeline.execution.resume import ResumePlan, digests, plan_resume, results
from pipeline.execution.run_spec import steps_of
from pipeline.execution.runner import Runner, look_ahead, require_same_recipe, run_dry
from pipeline.testing import context
from tests.support.processes import run_ranks
from tests.support.runs import TINY

CALLS: list[str] = []
GIVEN: list[tuple[str, object, object]] = []


class Live:
    """An artifact that exists in this process only."""

    def __init__(self, slot: str) -> None:
        self.slot = slot

    def close(self) -> None:
        CALLS.append(f"closed {self.slot}")


@dataclass(frozen=True, kw_only=True)
class File(Durable):
    """An artifact on disk."""

    path: Path

    def record(self) -> dict[str, Any]:
        return {"bytes": 3, "name": "relative", "path": str(self.path)}

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> File:
        if not Path(record["path"]).exists():
            raise StageError(f"{record['path']} is gone")
        return cls(path=Path(record["path"]))


@dataclass(frozen=True, kw_only=True)
class MakeLive:
    size: int = 1

    def run(self, ctx: Context) -> Live:
        CALLS.append(ctx.slot)
        return Live(ctx.slot)


@dataclass(frozen=True, kw_only=True)
class MakeFile:
    fail: bool = False

    def run(self, ctx: Context, live: Live | None) -> File:
        CALLS.append(ctx.slot)
        if self.fail:
            raise ValueError("no")
        path = ctx.run_dir / ctx.slot
        path.write_text("abc")
        return File(path=path)


@dataclass(frozen=True, kw_only=True)
class Both:
    def run(self, ctx: Context, one: Live, two: Live) -> File:
        CALLS.append(ctx.slot)
        path = ctx.run_dir / ctx.slot
        path.touch()
        return File(path=path)


@dataclass(frozen=True, kw_only=True)
class Copy:
    def run(self, ctx: Context, file: File) -> File:
        CALLS.append(f"{ctx.slot} of {file.path.name}")
        path = ctx.run_dir / ctx.slot
        path.write_text(file.path.read_text())
        return File(path=path)

    def verify_result(self, copy: File) -> None:
        if copy.path.read_text() != "abc":
            raise StageError(f"{copy.path} is another")


@dataclass(frozen=True, kw_only=True)
class Watch:
    def run(self, ctx: Context, live: Live | None, file: File | None) -> None:
        CALLS.append(ctx.slot)


@dataclass(frozen=True, kw_only=True)
class Export:
    def run(self, ctx: Context) -> ExportedModel:
        CALLS.append(ctx.slot)
        (ctx.run_dir / "model").mkdir(exist_ok=True)
        (ctx.run_dir / "model" / "weights").write_text("abc")
        return ExportedModel(folder=ctx.run_dir / "model", files=["weights"], total_bytes=3)


@dataclass(frozen=True, kw_only=True)
class Judge:
    def run(self, ctx: Context, model: ExportedModel) -> File:
        CALLS.append(ctx.slot)
        return File(path=ctx.run_dir)


@dataclass(frozen=True, kw_only=True)
class Liar:
    def run(self, ctx: Context) -> File:
        return "text"  # type: ignore[return-value]


def step(slot: str, stage: Any, **inputs: str | None) -> PlannedSlot:
    use = f"test.{type(stage).__name__.lower()}"
    return PlannedSlot(slot=slot, use=use, stage=stage, inputs=inputs, gives=gives(type(stage)))


def plan(*steps: PlannedSlot, seed: int = 0) -> Plan:
    kinds = {one.slot: type(one.stage) if one.stage else None for one in steps}
    view = SimpleNamespace(
        wiring=Wiring(kinds=kinds, inputs={one.slot: one.inputs for one in steps})
    )
    return Plan(recipe=SimpleNamespace(seed=seed), view=view, slots=steps, per_node=1)  # type: ignore[arg-type]


def chain(size: int = 1, fail: bool = False) -> Plan:
    """live -> file -> copy, and an end that reads nothing."""
    return plan(
        step("live", MakeLive(size=size)),
        step("file", MakeFile(fail=fail), live="live"),
        step("copy", Copy(), file="file"),
        step("end", MakeFile(), live=None),
    )


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    CALLS.clear()
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    return Journal(tmp_path / "journal.jsonl")


def run(plan: Plan, journal: Journal) -> list[str]:
    """Run the unfinished stages; return the events."""
    CALLS.clear()
    ctx = Context(
        run_dir=journal.path.parent, seed=0, dist=DistContext(device=None),  # type: ignore[arg-type]
        log=logging.getLogger("test"), metrics=Metrics(None),
    )  # fmt: skip
    found = plan_resume(plan, journal)
    runner = Runner(steps_of(plan), ctx, journal)
    try:
        runner.run(found.run, found.restore)
    finally:
        runner.close()
    return list(CALLS)


def test_order_and_dropping_after_the_last_reader(journal: Journal) -> None:
    assert run(chain(), journal) == ["live", "file", "closed live", "copy of file", "end"]
    events = [(event["event"], event["slot"]) for event in journal.events()]
    assert events[:4] == [
        ("slot started", "live"), ("slot finished", "live"),
        ("slot started", "file"), ("slot finished", "file"),
    ]  # fmt: skip
    assert run(chain(), journal) == []


def test_garbage_is_collected_once_behind_a_slot_that_was_the_last_to_read_live_artifacts(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("collect", "freeze"):
        monkeypatch.setattr(gc, name, lambda name=name: CALLS.append(name))
    several = plan(
        step("one", MakeLive()),
        step("two", MakeLive()),
        step("both", Both(), one="one", two="two"),
        step("end", Copy(), file="both"),
    )
    assert run(several, journal) == [
        "one", "two", "freeze", "both", "closed one", "closed two", "collect", "end of both"
    ]  # fmt: skip


def test_a_result_that_cannot_be_recorded_is_no_progress(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run would be started again for ever, each time without a restart in vain."""
    beats: list[str] = []
    monkeypatch.setattr(Heartbeat, "landmark", lambda self: beats.append("landmark"))
    run(chain(), journal)
    assert len(beats) == 3  # file, copy, end
    journal.path.unlink()
    beats.clear()
    monkeypatch.setattr(File, "record", lambda self: {"path": self.path})
    with pytest.raises(TypeError, match="not JSON serializable"):
        run(chain(), journal)
    assert beats == []


def test_a_failure_leaves_live_artifacts_to_close(journal: Journal) -> None:
    with pytest.raises(ValueError, match="no"):
        run(chain(fail=True), journal)
    assert CALLS == ["live", "file", "closed live"]
    assert set(journal.state().finished) == {"live"}
    assert run(chain(), journal)[:2] == ["live", "file"]


def test_a_wrong_artifact_is_refused(journal: Journal) -> None:
    with pytest.raises(StageError, match="liar gave str instead of File"):
        run(plan(step("a", Liar())), journal)


def test_a_changed_slot_runs_again_with_all_that_depends_on_it(journal: Journal) -> None:
    run(chain(), journal)
    todo = plan_resume(chain(size=2), journal)
    assert todo == ResumePlan(run=frozenset({"live", "file", "copy"}), restore={})


def test_a_result_that_is_not_as_it_was_left_is_made_again(journal: Journal) -> None:
    run(chain(), journal)
    copy = journal.path.parent / "copy"
    copy.write_text("abd")
    assert plan_resume(chain(), journal, thorough=False).run == set()
    assert plan_resume(chain(), journal).lost == (f"slot `copy` runs again: {copy} is another",)
    assert run(chain(), journal) == ["copy of file"]
    copy.unlink()
    assert plan_resume(chain(), journal).lost == (f"slot `copy` runs again: {copy} is gone",)
    assert run(chain(), journal) == ["copy of file"]
    assert run(chain(), journal) == []


def test_a_record_of_another_version_is_a_lost_result(journal: Journal) -> None:
    run(chain(), journal)
    journal.write("slot finished", slot="end", digest=digests(chain())["end"], record={"file": 1})
    assert plan_resume(chain(), journal).run == {"end"}


def test_a_damaged_export_is_made_again_though_its_readers_have_finished(journal: Journal) -> None:
    judged = plan(step("export", Export()), step("judge", Judge(), model="export"))
    assert run(judged, journal) == ["export", "judge"]
    model = journal.path.parent / "model"
    (model / "weights").unlink()
    assert run(judged, journal) == ["export"]
    shutil.rmtree(model)  # deleted on purpose
    assert run(judged, journal) == []


def watched(fail: bool) -> Plan:
    """live -> watch -> file -> copy, with a stage that takes nothing, and a stage behind the one it
    reads from."""
    return plan(
        step("live", MakeLive()),
        step("before", Watch(), live=None, file=None),
        step("watch", Watch(), live="live", file=None),
        step("file", MakeFile(fail=fail), live="live"),
        step("after", Watch(), live=None, file="file"),
        step("copy", Copy(), file="file"),
        step("last", Watch(), live="live", file=None),
    )


def test_what_was_live_is_made_live_again_for_what_comes_behind_it(journal: Journal) -> None:
    with pytest.raises(ValueError, match="no"):
        run(watched(fail=True), journal)
    assert run(watched(fail=False), journal)[:4] == ["live", "before", "watch", "file"]
    assert run(watched(fail=False), journal) == []
    (journal.path.parent / "copy").unlink()
    # the model is not built again for its watchers, which have seen it
    assert run(watched(fail=False), journal) == ["before", "copy of file"]


def test_a_copied_run_reads_its_own_results(journal: Journal, tmp_path: Path) -> None:
    run(chain(), journal)
    copy = Path(shutil.copytree(tmp_path, tmp_path / "copied"))
    (tmp_path / "file").write_text("trained anew")
    (copy / "copy").unlink()
    assert run(chain(), Journal(copy / "journal.jsonl")) == ["copy of file"]
    assert (copy / "copy").read_text() == "abc"
    assert list(results(chain(), Journal(copy / "journal.jsonl"))) == [
        (slot, copy / slot) for slot in ("file", "copy", "end")
    ]


def test_a_lost_intermediate_that_nobody_needs_stays_lost(journal: Journal) -> None:
    """Deleting the checkpoints of a finished run does not make it train again."""
    run(chain(), journal)
    (journal.path.parent / "file").unlink()
    assert run(chain(), journal) == []
    (journal.path.parent / "copy").unlink()
    assert run(chain(), journal) == ["live", "file", "closed live", "copy of file"]


def test_results_are_the_places_of_records(journal: Journal) -> None:
    run(chain(), journal)
    folder = journal.path.parent
    expected = [(slot, folder / slot) for slot in ("file", "copy", "end")]
    assert list(results(chain(), journal)) == expected
    (folder / "copy").unlink()
    assert [slot for slot, _ in results(chain(), journal)] == ["file", "end"]


def test_a_digest_covers_settings_use_seed_and_sources() -> None:
    base = digests(chain())
    assert digests(chain()) == base
    assert all(value != base[slot] for slot, value in digests(
        dataclasses.replace(chain(), recipe=SimpleNamespace(seed=1))  # type: ignore[arg-type]
    ).items())  # fmt: skip
    changed = digests(chain(size=2))
    assert {slot for slot in base if base[slot] != changed[slot]} == {"live", "file", "copy"}


class Saving(Checkpoints):
    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self, length: Any) -> None: ...
    def due(self, progress: Any) -> bool: ...
    def save(self, progress: Any) -> None: ...
    def poll(self) -> Any: ...
    def restore(self, validate: Any) -> None: ...
    def resource_needs(self, length: Any) -> Any: ...
    def best(self) -> Any: ...

    def finish(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Look:
    def run(self, ctx: Context, number: int, text: str | None) -> None:
        raise AssertionError("never run")

    def resource_needs(self, ctx: Context, text: str | None, number: int) -> Iterator[ResourceNeed]:
        GIVEN.append((ctx.slot, number, text))
        yield from ()

    def run_dry(self, ctx: Context, number: int, text: str | None, run: TrainedRun) -> None:
        GIVEN.append((ctx.slot, number, (text, run.checkpoint)))


@dataclass(frozen=True, kw_only=True)
class Save:
    name: str

    def run(self, ctx: Context) -> Checkpoints:
        raise AssertionError("never run")

    def run_dry(self, ctx: Context) -> Checkpoints:
        return Saving(self.name)


def wired_to(**inputs: str | None) -> Plan:
    def slot(name: str, gives: type, stage: Any = MakeLive()) -> PlannedSlot:
        return PlannedSlot(slot=name, use="a.b", stage=stage, inputs={}, gives=gives)

    numbers = [slot(name, int) for name in ("a", "b", "c")]
    saving = slot("s", Checkpoints, Save(name="c")), slot("train", TrainedRun)
    return plan(*numbers, *saving, step("look", Look(), **inputs))


def test_needs_and_dry_runs_get_what_the_slot_is_wired_to(tmp_path: Path) -> None:
    GIVEN.clear()
    artifacts: dict[str, Any] = {"b": 2, "a": 1, "c": "text"}
    ctx = context(tmp_path)
    for wires in ({"number": "a", "text": None}, {"number": "b", "text": "c"}):
        steps = steps_of(wired_to(**wires))
        look_ahead(steps, ctx, artifacts, frozenset({"look"}))
        run_dry(steps, ctx, artifacts)
    assert GIVEN == [
        ("look", 1, None),
        ("look", 1, (None, "c")),
        ("look", 2, "text"),
        ("look", 2, ("text", "c")),
    ]


def _recipe(folder: Path, lr: float) -> Path:
    stages = {
        "model": {"use": "model.hf", "config": {**TINY, "vocab_size": 32}},
        "precision": {"use": "precision.policy"},
        "data": {"use": "data.text", "files": f"{folder}/rows.txt"},
        "optimizer": {"use": "optimizer.adamw", "lr": lr},
        "wrap": {"use": "wrap.ddp"},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {"use": "train.causal_lm", "steps": 1, "global_batch_size": 2},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.txt").write_text("rain")
    (folder / "recipe.yaml").write_text(json.dumps({"name": "run", "stages": stages}))
    return folder / "recipe.yaml"


def _own_recipes(dist: DistContext, folder: str, rates: list[list[float]]) -> list[list[str]]:
    """Compare recipes in a folder of each rank's own, with data there: refusals, or the log."""
    own, found = Path(folder) / str(dist.rank), []
    for each in rates:
        plan = plan_file(_recipe(own, each[dist.rank]), skip_checks=True)
        said: list[str] = []
        log = logging.getLogger(f"ranks-{len(found)}")
        log.addFilter(lambda record, to=said: to.append(record.getMessage()) is not None)  # type: ignore[misc]
        try:
            ctx, stages = context(own, dist=dist), plan.recipe.public()["stages"]
            ctx = dataclasses.replace(ctx, log=log)
            require_same_recipe(plan.recipe, stages, steps_of(plan), ctx)
        except StageError as error:
            said = [str(error)]
        found.append(said)
    return found


def test_other_settings_are_refused_and_other_paths_logged(tmp_path: Path) -> None:
    """As of an older recipe in a folder of one machine."""
    first, second = run_ranks(_own_recipes, 2, str(tmp_path), [[0.003, 0.3], [0.003, 0.003]])
    assert first == second
    (refused,), logged = first
    assert "optimizer.lr is 0.003 on rank 0, 0.3 on rank 1 (give every machine" in refused
    assert f"data.files is {tmp_path}/0/rows.txt on rank 0, {tmp_path}/1/rows.txt on" in logged[0]
