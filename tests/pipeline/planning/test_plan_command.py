"""`pipe plan`: what it says of recipes, and to mistakes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from pipeline.artifacts import Data, ExportedModel
from pipeline.cli import main
from pipeline.engine import Engine
from pipeline.planning.planner import GROUP
from pipeline.registry import BUILT_IN, Entry, Registry, installed_entries
from pipeline.stage import Context
from pipeline.state.blocks import PASSAGE
from tests.support.tier import spread

ROOT_FOLDER = Path(__file__).parents[3]
RECIPES = ROOT_FOLDER / "recipes"
FAMILY = [path.name for path in sorted(RECIPES.glob("llama*.yaml"))]
COPY = "copy for checkpoints"
PARAMETERS = 8_030_261_248
"""Of Llama 3.1 8B."""


def pipe(*arguments: str | Path, obj: Registry | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], obj=obj)


def planned(*arguments: str | Path) -> dict[str, Any]:
    result = pipe("plan", "--json", *arguments)
    record: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if record["fits"] in (True, None) else 3)
    return record


@pytest.mark.parametrize("recipe", spread(FAMILY, 3))
def test_every_recipe_can_be_planned(recipe: str) -> None:
    record = planned(RECIPES / recipe)
    phases = ["load", "forward and loss", "backward", "optimizer step", "checkpoint", "resume"]
    assert list(record["device"]) == phases
    assert list(record["host"]) == [*phases, "export"]
    assert record["work"]["products"] > 0
    assert record["caveats"] == []
    assert {file["what"] for file in record["storage"]} >= {"export"}
    shown = pipe("plan", RECIPES / recipe, "--explain")
    assert shown.exit_code in (0, 3), shown.output
    told = shown.output.split("how these come about")[1]
    for item in {item for peak in record["device"].values() for item in peak["items"]}:
        line = next(line for line in told.splitlines() if line.startswith(f"  {item}  "))
        assert line.removeprefix(f"  {item}").strip(), item


def test_states_of_llama_8b_by_hand() -> None:
    """A share of 8 ranks: fp32 masters and gradients, two moments in fp32 (ZeRO, Rajbhandari et
    al. 2020, with fp32 gradients)."""
    held = planned(RECIPES / "llama8b_fsdp.yaml")["device"]
    share = 4 * PARAMETERS // 8
    assert held["checkpoint"]["items"] == {"parameters": share, "optimizer state": 2 * share}
    assert held["optimizer step"]["items"]["gradients"] == share
    assert held["load"]["bytes"] == share


def test_an_average_takes_four_bytes_an_element(tmp_path: Path) -> None:
    recipe = tmp_path / "averaged.yaml"
    base = RECIPES / "llama8b_fsdp.yaml"
    average = "  wrap: {}\n  average: {use: average.ema}\n"
    recipe.write_text(f"extends: {base}\nname: averaged\nstages:\n{average}", "utf-8")
    before, after = planned(base), planned(recipe)
    more = {
        phase: after["device"][phase]["bytes"] - before["device"][phase]["bytes"]
        for phase in before["device"]
    }
    assert more.pop("load") == 0
    assert set(more.values()) == {4 * PARAMETERS // 8}
    # and in each checkpoint, which is 12 bytes an element without
    saved = [record["storage"][0]["bytes"] for record in (before, after)]
    assert saved[1] * 12 == saved[0] * 16
    copies = [record["host"]["checkpoint"]["items"][COPY] for record in (before, after)]
    assert copies == [12 * PARAMETERS, 16 * PARAMETERS]


@pytest.mark.parametrize(
    ("fields", "what", "number"),
    [
        (["checkpoint.keep=null"], "2 checkpoints, and one more every 100 steps", 2),
        (["checkpoint.keep=null", "train.epochs=null", "train.steps=1000"], "10 checkpoints", 10),
        # 500; 800, 900; and 1000 while it is written
        (["checkpoint.keep_every=500", "train.epochs=null", "train.steps=1000"],
         "4 checkpoints", 4),
    ],
)  # fmt: skip
def test_disk_is_for_every_checkpoint_that_will_be_there(
    fields: list[str], what: str, number: int
) -> None:
    recipe = RECIPES / "llama8b_fsdp.yaml"
    file = planned(recipe, "checkpoint.every=100", *fields)["storage"][0]
    assert file["what"] == what
    assert file["bytes"] == number * 12 * PARAMETERS


def test_the_copy_for_checkpoints_is_there_once_the_model_is_loaded() -> None:
    """A host that is too small for it is so from the first step on."""
    record = planned(RECIPES / "llama8b_fsdp.yaml", "--gpu", "H100", "--host-memory", "60")
    copies = {phase: peak["items"].get(COPY, 0) for phase, peak in record["host"].items()}
    assert copies.pop("load") == copies.pop("export") == 0
    assert set(copies.values()) == {12 * PARAMETERS}
    assert record["short"] == {"host": "forward and loss"}


@pytest.mark.parametrize("override", ["checkpoint.asynchronous=false", "wrap.cpu_offload=true"])
def test_what_waits_for_the_disk_or_is_on_the_host_passes_in_a_bounded_memory(
    override: str,
) -> None:
    host = planned(RECIPES / "llama8b_fsdp.yaml", override)["host"]
    assert host["checkpoint"]["items"][COPY] == 8 * PASSAGE


def accelerated(file: Path, recipe: str, kind: str, more: str = "") -> dict[str, Any]:
    file.write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\n"
        f"num_processes: 8\nnum_machines: 1\nmixed_precision: 'no'\n{more}",
        "utf-8",
    )
    slot = json.dumps({"use": "wrap.accelerate", "config": str(file)})
    return planned(RECIPES / recipe, "precision.compute=fp32", f"wrap={slot}")


def test_replicas_of_accelerate_keep_buckets_beside_gradients(tmp_path: Path) -> None:
    held = accelerated(tmp_path / "accelerate.yaml", "llama8b_ddp.yaml", "MULTI_GPU")["device"]
    assert held["optimizer step"]["bytes"] == 20 * PARAMETERS
    # buckets are made when replicas are the same


def test_accelerate_shards_what_was_whole_on_the_host(tmp_path: Path) -> None:
    fsdp = "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n"
    found = accelerated(tmp_path / "accelerate.yaml", "llama8b_fsdp.yaml", "FSDP", fsdp)
    own = planned(RECIPES / "llama8b_fsdp.yaml", "precision.compute=fp32")
    assert found["device"] == own["device"]
    whole = 8 * 4 * PARAMETERS
    assert found["host"]["load"]["items"]["models before they are sharded"] == whole
    assert found["host"]["load"]["bytes"] == own["host"]["load"]["bytes"] + whole


def test_ranks_without_samples_and_other_processes_are_told() -> None:
    recipe = RECIPES / "llama8b_fsdp.yaml"
    few = (recipe, "train.global_batch_size=6", "train.micro_batch_size=1")
    assert "2 of 8 ranks idle: there is no sample for them in a step" in pipe("plan", *few).output
    assert planned(*few)["idle_ranks"] == 2
    told = "the recipe says 8 processes; planned for 16, as asked"
    assert told in pipe("plan", recipe, "--nodes", "2").output
    assert "the recipe says" not in pipe("plan", recipe, "launch.procs=4").output


def test_a_host_of_which_nothing_was_said_is_not_said_to_suffice() -> None:
    recipe, gpus = RECIPES / "llama8b_fsdp.yaml", ("--gpu", "H100")
    verdict = pipe("plan", recipe, *gpus).stdout.splitlines()[0]
    assert verdict.startswith("fits: ")
    assert re.search(r"if a host has [0-9.]+ GiB$", verdict)
    known = pipe("plan", recipe, *gpus, "--host-memory", "1000").stdout.splitlines()[0]
    assert known.endswith(" GiB of 1000.0 a host")
    assert planned(recipe)["fits"] is None


def test_json_has_no_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    def refused(name: str) -> None:
        raise AssertionError(name)

    file, recipe = tmp_path / "plan.json", RECIPES / "llama70b_zero3_offload.yaml"
    machine = ("--gpu", "H100", "--nvme", "0.001", "--interconnect", "1000000", "--nodes", "2")
    result = pipe("plan", recipe, "--json", *machine, "--out", file)
    for text in (result.stdout, file.read_text("utf-8")):
        assert json.loads(text, parse_constant=refused)["seconds"]["least"] > 0


def test_what_cannot_be_written_is_no_bug_of_ours(tmp_path: Path) -> None:
    nowhere = tmp_path / "no" / "folder" / "x"
    result = pipe("plan", RECIPES / "llama8b_fsdp.yaml", "--out", nowhere)
    assert result.exit_code == 2
    assert "No such file or directory" in result.output


@dataclass(frozen=True, kw_only=True)
class Mute:
    """Say nothing of what it needs."""

    def run(self, ctx: Context, exported: ExportedModel) -> None: ...


@dataclass(frozen=True, kw_only=True)
class MuteWrap:
    """A strategy that says nothing."""

    def run(self, ctx: Context) -> Engine: ...


@dataclass(frozen=True, kw_only=True)
class MuteData:
    """Samples of which nothing is said."""

    def run(self, ctx: Context) -> Data: ...


TEXT = RECIPES / "data" / "persuasion.txt"
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "vocab_size": 1000,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
}  # fmt: skip
BLOCK = 4 * 64 * 64 + 3 * 64 * 160 + 2 * 64
ROOT = 2 * 1000 * 64 + 64
RANK = 8
UPDATES = RANK * (4 * (64 + 64) + 3 * (64 + 160))
"""Elements of a block's updates."""
SLOTS: dict[str, Any] = {
    "model": {"use": "model.hf", "config": LLAMA},
    "precision": {"use": "precision.policy"},
    "data": {"use": "data.text", "files": str(TEXT), "sequence_length": 64},
    "optimizer": {"use": "optimizer.adamw"},
    "wrap": {"use": "wrap.ddp"},
    "checkpoint": {"use": "checkpoint.sharded"},
    "train": {"use": "train.causal_lm", "steps": 1, "global_batch_size": 2},
    "consolidate": {"use": "consolidate.stream"},
    "export": {"use": "export.safetensors"},
}
PLUGINS = {"plugin.mute": Mute, "wrap.mute": MuteWrap, "data.mute": MuteData}


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    def run(stages: dict[str, Any], *options: str, device: str = "cpu") -> Result:
        file = tmp_path / "recipe.yaml"
        recipe = {"name": "r", "launch": {"procs": 2, "device": device}, "stages": stages}
        file.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
        more = [
            Entry(name=name, value=f"{__name__}:{kind.__name__}", distribution="p", version="1")
            for name, kind in PLUGINS.items()
        ]
        registry = Registry([*Registry.installed().entries(), *more])
        return pipe("plan", file, *options, obj=registry)

    return run


def told(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def test_a_slot_without_a_forecast_is_named(plan: Any) -> None:
    stages = SLOTS | {"tell": {"use": "plugin.mute"}}
    uncounted = "slot `tell` (plugin.mute) has no forecast"
    assert f"not counted: {uncounted}" in plan(stages).stdout.splitlines()
    assert told(plan(stages, "--json"))["caveats"] == [uncounted]


@pytest.mark.parametrize(
    ("slot", "why"),
    [("wrap", "no slot wraps the model"), ("data", "no slot of the recipe tells the length of")],
)
def test_a_slot_that_others_build_on_has_to_tell(plan: Any, slot: str, why: str) -> None:
    said = plan(SLOTS | {slot: {"use": f"{slot}.mute"}})
    assert said.exit_code == 2
    assert why in said.output


def test_every_stage_of_ours_but_evaluation_has_a_planner() -> None:
    ours = {one.name for one in Registry.installed().entries() if one.distribution == BUILT_IN}
    assert len(ours) > 20
    assert ours - {"evaluate.lm"} == {entry.name for entry in installed_entries(GROUP)}


def test_what_a_check_warns_of_is_told(plan: Any) -> None:
    config = LLAMA | {"max_position_embeddings": 63}
    stages = SLOTS | {"model": {"use": "model.hf", "config": config}}
    (warning,) = told(plan(stages, "--json"))["warnings"]
    assert "have 64 tokens, and the model's config states 63 positions" in warning
    assert f"warning: {warning}" in plan(stages).stdout.splitlines()


def test_what_comes_after_training(plan: Any) -> None:
    stages = SLOTS | {
        "evaluate": {"use": "evaluate.lm", "files": str(TEXT)},
        "publish": {"use": "publish.hub", "repo": "a/b", "dry_run": True},
    }
    caveats = told(plan(stages, "--json"))["caveats"]
    assert caveats == ["slot `evaluate` (evaluate.lm) has no forecast"]


def test_an_adapter_that_is_exported_alone(plan: Any) -> None:
    slots = list(SLOTS.items())
    adapter = ("adapter", {"use": "adapter.lora", "rank": RANK})
    stages = dict([slots[0], adapter, *slots[1:]])
    stages["export"] = {"use": "export.adapter", "dtype": "bf16"}
    record = told(plan(stages, "--json"))
    (export,) = (file for file in record["storage"] if file["what"] == "export")
    assert export["bytes"] == 2 * 3 * UPDATES
    proof = record["host"]["export"]["items"]["proof of the export"]
    assert proof == 4 * (ROOT + BLOCK) + 2 * 3 * UPDATES + (64 << 20)
