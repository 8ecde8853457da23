"""Models of the hub by name: noted by `pipe check`, refused with `--pinned`, and resolved once by a
run, which keeps the commit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from pipeline.chain.plan import plan_file, resolved, unpinned
from pipeline.cli import main
from pipeline.utils import hub
from tests.pipeline.conftest import TinyRun
from tests.support.hub import FIRST, SECOND, HubCache, HubServer, hub_cache, serving
from tests.support.pipe import Outcome, Pipe
from tests.support.tiny_project import CHAIN, TEXT

__all__ = ["hub_cache"]


@pytest.fixture
def by_name(tmp_path: Path) -> Path:
    """Return a recipe that names a model without a commit."""
    (tmp_path / "text.txt").write_text(TEXT)
    stages = {slot: dict(fields) for slot, fields in CHAIN.items()}
    stages["model"] = {"use": "model.hf", "path": "tiny/model"}
    stages["train"] = {"use": "train.causal_lm", "steps": 2, "global_batch_size": 4}
    file = tmp_path / "tiny.yaml"
    launch = {"procs": 1, "device": "cpu", "threads": 1, "restarts": {"limit": 0}}
    content = {"name": "tiny", "launch": launch, "stages": stages}
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_check_notes_a_name_without_a_commit(by_name: Path) -> None:
    checked = invoke("check", str(by_name))
    assert checked.exit_code == 0, checked.stderr
    note = "model.path: tiny/model names no commit (`pipe pin` writes its commit into the recipe)"
    assert f"note: {by_name}:11:11: {note}" in checked.stderr
    found = json.loads(invoke("check", str(by_name), "--json").stdout)
    assert [one["key"] for one in found["notes"]] == ["model.path"]
    branch = invoke("check", str(by_name), "model.revision=v1")
    assert "model.revision: 'v1' is a branch or tag, not a commit" in branch.stderr
    assert "note" not in invoke("check", str(by_name), f"model.revision='{FIRST}'").stderr


@pytest.mark.parametrize(
    ("command", "option"), [*itertools.product(["check", "run", "plan"], ["--pinned", ""])]
)
def test_pinned_refuses_it(
    command: str, option: str, by_name: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not option:
        monkeypatch.setenv("PIPE_PINNED", "1")
    refused = invoke(command, str(by_name), *filter(None, [option]))
    assert refused.exit_code == 2
    assert refused.stderr.splitlines()[-1] == (
        f"{by_name}:11:11: model.path: tiny/model names no commit (`pipe pin` writes its commit "
        "into the recipe)"
    )


def test_pinned_refuses_a_resume_under_it(by_name: Path, tiny_run: TinyRun) -> None:
    refused = invoke("resume", str(tiny_run.folder), "--recipe", str(by_name), "--pinned")
    assert refused.exit_code == 2
    assert "model.path: tiny/model names no commit" in refused.stderr


def test_every_name_is_resolved_at_its_place(
    by_name: Path, hub_cache: HubCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache.refer("model", "tiny/model", main=FIRST)
    hub_cache.refer("model", "tiny/tokens", v1=SECOND)
    hub_cache.refer("dataset", "tiny/rows", main=SECOND)
    sources = "[{files: ./text.txt}, {dataset: tiny/rows}]"
    more = ["model.tokenizer=tiny/tokens", "model.tokenizer_revision=v1", "data.files=[]"]
    monkeypatch.chdir(by_name.parent)
    plan = plan_file(by_name, [*more, f"data.sources={sources}"])
    assert [problem.key for problem in unpinned(plan.recipe, plan.view.slots)] == [
        "model.path", "model.tokenizer_revision", "data.sources.1.dataset",
    ]  # fmt: skip
    assert resolved(plan, {}, ask=False) == plan
    done = resolved(plan, {})
    assert not [*unpinned(done.recipe, done.view.slots)]
    model, data = done.slots[0].stage, done.view.slots["data"]
    assert (model.revision, model.tokenizer_revision) == (FIRST, SECOND)
    assert [source.revision for source in data.sources] == [None, SECOND]
    assert done.slots[2].stage is data
    assert done.slots[3].stage is plan.slots[3].stage
    again = yaml.safe_load(done.recipe.dump())["stages"]
    assert again["data"]["sources"][1] == {"dataset": "tiny/rows", "revision": SECOND}
    assert again["model"]["tokenizer_revision"] == SECOND
    assert [one["commit"] for one in done.hub] == [FIRST, SECOND, SECOND]


def test_a_name_that_nobody_knows(
    by_name: Path, hub_cache: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(by_name.parent)
    refused = invoke("run", "tiny.yaml")
    assert refused.exit_code == 2
    expected = "tiny.yaml:11:11: model.path: tiny/model: this machine's cache"
    assert refused.stderr.startswith(expected)
    assert not (by_name.parent / "runs").exists()


def test_a_saved_plan_names_the_commit(
    by_name: Path, hub_cache: HubCache, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(by_name.parent)
    hub_cache.add("tiny/model", FIRST, tiny_run.folder / "export", main=FIRST)
    planned = invoke("plan", "tiny.yaml", "--out", "plan.json", "--quiet")
    assert planned.exit_code == 0, planned.stderr
    assert planned.stderr == ""
    identity = json.loads(Path("plan.json").read_text())["identity"]
    assert identity["stages"]["model"]["revision"] == FIRST
    same = invoke("run", "tiny.yaml", "--plan", "plan.json", "--dry-run")
    assert same.exit_code == 0, same.stderr
    hub_cache.add("tiny/model", SECOND, tiny_run.folder / "export", main=SECOND)
    hub._asked.cache_clear()
    for more in ([], ["--dry-run"]):
        moved = invoke("run", "tiny.yaml", "--plan", "plan.json", *more)
        assert moved.exit_code == 4, moved.output
        assert f'model.revision is "{SECOND}" instead of "{FIRST}"' in moved.stderr
    assert not Path("runs").exists()


@pytest.fixture
def served(tiny_run: TinyRun) -> Iterator[HubServer]:
    """Serve a hub with a tiny model."""
    with serving() as made:
        made.add("tiny/model", tiny_run.folder / "export", main=FIRST)
        yield made


def test_a_run_keeps_the_commit(by_name: Path, served: HubServer, plugin: Path) -> None:
    pipe = Pipe(plugin, by_name.parent)
    environment = served.environment(by_name.parent / "cache")

    def call(*arguments: str, **more: str) -> Outcome:
        return pipe.end(pipe.start("-m", "pipetrain", *arguments, **environment, **more))

    def commits(run: str) -> tuple[str, str]:
        recipe = yaml.safe_load((by_name.parent / run / "recipe.yaml").read_text())
        origins = json.loads((by_name.parent / run / "origins.json").read_text())
        return recipe["stages"]["model"]["revision"], origins["stages.model.revision"]

    first = call("run", "tiny.yaml", "--run-dir", "one", "--until", "data")
    assert first.code == 0, first.stderr
    assert f"model: tiny/model is main at {FIRST}\n" in first.stderr
    assert commits("one") == (FIRST, "the hub, main at the start")
    served.repositories["models", "tiny/model"].refs["main"] = SECOND
    # the same command goes on with the commit, and so does a resume, which needs no hub for it
    served.requests.clear()
    second = call("run", "tiny.yaml", "--run-dir", "one", "--until", "train")
    assert second.code == 0, second.stderr
    assert f"main at {FIRST}, as when this run began" in second.stderr
    served.status = 503
    third = call("resume", "one", PIPE_PINNED="1")
    assert third.code == 0, third.stderr
    assert "tiny/model is" not in third.stderr
    assert commits("one")[0] == FIRST
    asked = [line for line in served.requests if line.startswith("GET /api/models")]
    assert not [line for line in asked if "revision" in line]
    # offline, a new run takes what is in the cache, and says so
    offline = call("run", "tiny.yaml", "--run-dir", "two", "--until", "data")
    assert offline.code == 0, offline.stderr
    assert f"main at {FIRST}, the only commit in this machine's cache" in offline.stderr
    served.status = None
    third_run = call("run", "tiny.yaml", "--run-dir", "three", "--until", "data")
    assert commits("three")[0] == SECOND, third_run.stderr


@pytest.mark.full
def test_a_run_of_an_earlier_version_is_resumed(
    by_name: Path, served: HubServer, plugin: Path
) -> None:
    """Its recipe allows names without a commit by a field that is gone."""
    pipe = Pipe(plugin, by_name.parent)
    environment = served.environment(by_name.parent / "cache")

    def call(*arguments: str) -> Outcome:
        return pipe.end(pipe.start("-m", "pipetrain", *arguments, **environment))

    first = call("run", "tiny.yaml", "--run-dir", "one", "--until", "train")
    recipe = by_name.parent / "one/recipe.yaml"
    content = yaml.safe_load(recipe.read_text())
    content["stages"]["model"] |= {"revision": None, "allow_floating_revision": True}
    recipe.write_text(yaml.safe_dump(content, sort_keys=False))
    assert first.code == 0, first.stderr
    resumed = call("resume", "one")
    assert resumed.code == 0, resumed.stderr
    assert (
        "model.allow_floating_revision: is not a field any more, and has no effect (leave it out: "
        "names without a commit are accepted)"
    ) in resumed.stderr
    assert f"main at {FIRST}, as when this run began" in resumed.stderr
    model = yaml.safe_load(recipe.read_text())["stages"]["model"]
    assert model == {"use": "model.hf", "path": "tiny/model", "revision": FIRST}
    checked = invoke("check", str(by_name), "model.allow_floating_revision=true")
    assert checked.exit_code == 0
    assert "model.allow_floating_revision: is not a field any more" in checked.stderr
