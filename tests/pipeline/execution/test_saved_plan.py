"""Plans as files, and drift from them."""

from __future__ import annotations

import functools
import json
import operator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.chain.plan import Plan, plan_file
from pipeline.cli import main
from pipeline.distributed.environment import TORCHRUN_VARIABLES, started
from pipeline.distributed.settings import ProcessCounts
from pipeline.errors import PlanDrift, UsageError
from pipeline.execution.saved_plan import identity, require_planned

RECIPE = Path(__file__).parents[3] / "recipes" / "llama8b_fsdp.yaml"
Record = dict[str, Any]


def plan(*overrides: str, recipe: Path = RECIPE, procs: int | None = None) -> Plan:
    return plan_file(recipe, overrides, started=ProcessCounts(procs=procs))


def saved(file: Path, plan: Plan, per_node: int = 8) -> Record:
    record = {"schema_version": 3, "identity": identity(plan, per_node).model_dump()}
    file.write_text(json.dumps(record), "utf-8")
    return record


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def drift(file: Path, now: Plan, per_node: int | None = 8) -> str:
    """Return the drift, empty if there is none."""
    try:
        require_planned(now, per_node, file)
    except PlanDrift as error:
        return str(error).removeprefix(f"not what was planned in {file}: ")
    return ""


def pipe(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["train.log_every=3"], "train.log_every is 3 instead of 5"),
        (["launch.procs=4"], "processes is 4 instead of 8"),
        (["launch.device=cpu"], 'device is "cpu" instead of "cuda"'),
        (["seed=5"], "seed is 5 instead of 0"),
        (["optimizer.betas=[0.9,0.99]"], "optimizer.betas is [0.9, 0.99] instead of [0.9, 0.95]"),
        (["model.activation_checkpointing={every: 2}"],
         'model.activation_checkpointing is '
         '{"every": 2, "keep": "nothing", "offload": false} instead of null'),
        (["wrap={use: wrap.ddp}"], 'wrap.use is "wrap.ddp" instead of "wrap.fsdp"'),
        (["train.takes={callback: null}"], 'train.takes is {"callback": null} instead of null'),
        (["consolidate=null", "export=null"], "slot `consolidate` is gone; slot `export` is gone"),
    ],
)  # fmt: skip
def test_differences_are_told_with_both_values(overrides: list[str], told: str, file: Path) -> None:
    saved(file, plan())
    assert drift(file, plan(*overrides)) == told
    assert drift(file, plan()) == ""


def test_a_slot_that_was_not_planned(file: Path) -> None:
    saved(file, plan("export=null"))
    assert drift(file, plan()) == "slot `export` is new"


def test_defaults_that_are_written_out_are_no_drift(file: Path) -> None:
    saved(file, plan())
    written = "train.shuffle=true", "train.workers=1", "train.anomalies={}", "model.init=pretrained"
    assert drift(file, plan(*written)) == ""


def chat(place: Path, name: str = "d.jsonl") -> Path:
    """Write rows of chats into a new folder."""
    place.mkdir(parents=True, exist_ok=True)
    (place / name).write_bytes((RECIPE.with_name("data") / "chat.jsonl").read_bytes())
    return place


def test_a_recipe_elsewhere_is_the_same_recipe(file: Path, tmp_path: Path) -> None:
    text = RECIPE.with_name("llama8b_ddp.yaml").read_text("utf-8")
    recipes = [
        chat(tmp_path / place / "data", "chat.jsonl").with_name("recipe.yaml")
        for place in ("here", "there")
    ]
    for recipe in recipes:
        recipe.write_text(text, "utf-8")
    record = saved(file, plan(recipe=recipes[0]))
    assert record["identity"]["stages"]["data"]["files"] == "./data/chat.jsonl"
    assert drift(file, plan(recipe=recipes[1])) == ""


def test_files_of_the_same_name_in_two_folders_are_two(file: Path, tmp_path: Path) -> None:
    inner = chat(chat(tmp_path / "ex") / "sub")
    base = f"extends: {RECIPE.with_name('llama8b_ddp.yaml')}\nname: small\n"
    data = "stages: {data: {files: ./d.jsonl}}"
    (tmp_path / "ex" / "base.yaml").write_text(f"{base}{data}\n", "utf-8")
    recipe = inner / "child.yaml"
    recipe.write_text("extends: ../base.yaml\n", "utf-8")
    record = saved(file, plan(recipe=recipe))
    assert record["identity"]["stages"]["data"]["files"] == "../d.jsonl"
    recipe.write_text(f"extends: ../base.yaml\n{data}\n", "utf-8")
    told = 'data.files is "./d.jsonl" instead of "../d.jsonl"'
    assert drift(file, plan(recipe=recipe)) == told


def test_ranks_of_a_node_are_part_of_a_plan(file: Path) -> None:
    saved(file, plan(), 4)
    assert drift(file, plan(), 8) == "processes_per_node is 8 instead of 4"
    assert drift(file, plan(), None) == ""


def test_versions_count_without_what_they_were_built_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(**versions: str) -> None:
        monkeypatch.setattr("pipeline.utils.packages.versions", lambda: versions)

    installed(torch="2.13.0+cpu", transformers="5.1.0")
    assert saved(file, plan())["identity"]["versions"]["torch"] == "2.13.0"
    installed(torch="2.13.0+cu126", transformers="5.1.0", deepspeed="0.18.0")
    assert drift(file, plan()) == ""
    installed(torch="2.14.0+cu126", transformers="5.1.0")
    assert drift(file, plan()) == 'torch is "2.14.0" instead of "2.13.0"'


def test_what_the_environment_says_is_not_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("secret", "elsewhere"):
        chat(tmp_path / place, "a.jsonl")
    monkeypatch.setenv("PLACE", f"{tmp_path}/secret")
    recipe = tmp_path / "recipe.yaml"
    data = "data: {files: ['${oc.env:PLACE}/a.jsonl']}"
    recipe.write_text(f"extends: {RECIPE}\nname: x\nenv: [PLACE]\nstages:\n  {data}\n", "utf-8")
    record = saved(file, plan(recipe=recipe))
    assert record["identity"]["stages"]["data"]["files"] == ["${oc.env:PLACE}/a.jsonl"]
    assert "secret" not in file.read_text("utf-8")
    monkeypatch.setenv("PLACE", f"{tmp_path}/elsewhere")
    assert drift(file, plan(recipe=recipe)) == ""


@dataclass(frozen=True)
class Odd:
    """Fields that JSON cannot represent."""

    limit: float = float("inf")
    names: frozenset[str] = frozenset({"b", "a"})
    folder: Path = Path("/x")


def test_what_json_does_not_know_is_text() -> None:
    real = plan()
    odd = replace(real, slots=(replace(real.slots[0], stage=Odd()),))
    fields = identity(odd, 8).stages["model"]
    assert fields == {
        "use": "model.hf", "limit": "inf", "names": ["a", "b"], "folder": "/x",
    }  # fmt: skip


GONE: Any = object()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema_version", 2, "schema_version: Input should be 3"),
        ("identity", GONE, "identity: Field required"),
        ("identity", [], "identity: Input should be an object"),
        ("identity.stages", [], "identity.stages: Input should be"),
        ("identity.stages.wrap", "fsdp", "identity.stages.wrap: Input should be"),
        ("identity.seed", GONE, "identity.seed: Field required"),
        ("identity.processes", "8", "identity.processes: Input should be a valid int"),
        ("identity.processes", 0, "identity.processes: Input should be greater"),
        ("identity.device", "tpu", "identity.device: Input should be 'cpu' or 'cuda'"),
        ("identity.versions", {"torch": 2}, "identity.versions.torch: Input should be"),
    ],
)
def test_damaged_plans_say_which_key(key: str, value: Any, message: str, file: Path) -> None:
    record = saved(file, plan())
    *path, last = key.split(".")
    inner = functools.reduce(operator.getitem, path, record)
    inner[last] = value
    if value is GONE:
        del inner[last]
    file.write_text(json.dumps(record), "utf-8")
    with pytest.raises(UsageError, match=f"plan.json is not a saved plan: {message}"):
        require_planned(plan(), 8, file)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"null", b"\xff", b'{"a":'])
def test_other_files_are_no_plans(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"is not a saved plan: .*pipe plan RECIPE --out"):
        require_planned(plan(), 8, file)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        require_planned(plan(), 8, file.with_name("none.json"))


def test_a_run_of_anything_else_is_refused(file: Path, tmp_path: Path) -> None:
    recipe = RECIPE.with_name("smollm_ddp.yaml")
    assert pipe("plan", recipe, "--out", file).exit_code == 0
    for change, told in (
        ("launch.procs=4", "processes is 4 instead of 2; processes_per_node is 4 instead of 2"),
        ("train.steps=3", "train.steps is 3 instead of 20"),
    ):
        result = pipe("run", recipe, change, "--plan", file, "--runs", tmp_path / "runs")
        assert result.exit_code == 4, result.output
        assert told in result.output
    file.write_text("{}", "utf-8")
    assert pipe("run", recipe, "--plan", file, "--runs", tmp_path / "runs").exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_a_launcher_tells_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert started().per_node is None
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "0")
    assert started().per_node == 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert started().per_node is None
