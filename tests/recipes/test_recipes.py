"""Every shipped recipe passes the check; members of a family differ in their strategy only."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pipeline.chain.plan import plan_file
from tests.support.command import pipe
from tests.support.tier import FULL, spread

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
FAMILIES = {
    "smollm": ("ddp", "fsdp", "zero1", "zero2", "zero3", "zero3_offload", "zero3_nvme"),
    "llama8b": ("ddp", "fsdp", "zero2"),
    "llama70b": ("fsdp", "tp_fsdp", "zero3", "zero3_offload"),
}
AXES = ("llama405b_3d", "llama8b_1m_context", "qwen3_moe_ep")
"""Recipes with axes of parallelism beside the data-parallel one."""
ADAPTED = {"smollm_lora": "smollm_ddp", "llama70b_lora_fsdp": "llama70b_fsdp"}


@functools.cache
def planned_stages(path: Path) -> Any:
    return plan_file(path, (), for_this_machine=False)


def test_all_promised_recipes_are_there() -> None:
    names = {f"{family}_{member}" for family, members in FAMILIES.items() for member in members}
    others = {"quickstart", "two_trainings", *AXES}
    assert {path.stem for path in RECIPES} == names | ADAPTED.keys() | others


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_passes_the_check_and_names_itself(path: Path) -> None:
    plan = planned_stages(path)
    assert plan.recipe.name == path.stem
    assert plan.warnings == ()
    adapter = ["adapter"] if path.stem in ADAPTED else []
    training = ["data", "optimizer", "wrap", "checkpoint", "train"]
    if path.stem == "two_trainings":
        training = [
            "optimizer", "novel", "wrap", "checkpoint", "train",
            "trained", "tickets", "wrap_chat", "checkpoint_chat", "chat",
        ]  # fmt: skip
    assert [step.slot for step in plan.slots] == [
        "model", *adapter, "precision", *training, "consolidate", "export",
    ]  # fmt: skip


def test_a_recipe_s_second_training_takes_the_model_of_the_first() -> None:
    plan = planned_stages(FOLDER / "two_trainings.yaml")
    taken = {step.slot: set(step.inputs.values()) for step in plan.slots}
    assert taken["trained"] == {"train", "model"}
    assert taken["wrap_chat"] == {"trained", "precision", "optimizer"}
    assert taken["chat"] >= {"wrap_chat", "tickets", "checkpoint_chat", "trained"}
    assert taken["export"] == {"consolidate", "trained", "chat"}


@functools.cache
def planned(path: Path, gpu: str) -> str:
    """Return the output of `pipe plan` for a recipe on that GPU."""
    return pipe("plan", path, "--gpu", gpu).stdout


PLANNED = re.compile(r"# Planned for (\d+) x (\w+): (\d+) GiB a GPU\.")


@pytest.mark.parametrize(
    "path",
    spread([path for path in RECIPES if path.stem.startswith(("llama", "qwen"))], 4),
    ids=lambda path: path.stem,
)
def test_figures_in_a_recipe_s_comment_are_the_plan_s(path: Path) -> None:
    ((ranks, gpu, figure),) = PLANNED.findall(path.read_text("utf-8"))
    said = planned(path, gpu)
    assert f", {ranks} x {gpu}" in said.splitlines()[1]
    needed = re.match(r"fits: ([\d.]+) GiB of [\d.]+ a GPU", said)
    assert needed is not None
    assert round(float(needed[1])) == int(figure)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_comments_have_no_other_figures(path: Path) -> None:
    comments = " ".join(re.findall("#.*", PLANNED.sub("", path.read_text("utf-8"))))
    unit = r"(?<![-\w.])[\d.e]+ ?([kKMGT]i?B?|bytes?)\b"
    assert re.search(unit, comments) is None, comments


def test_what_is_replicated_fits_no_smaller_gpu() -> None:
    for gpu in ("H100", "H200") if FULL else ("H200",):
        assert "does not fit" in planned(FOLDER / "llama8b_ddp.yaml", gpu)


def settings(path: Path) -> dict[str, Any]:
    plan = planned_stages(path)
    return {step.slot: (step.use, dataclasses.asdict(step.stage)) for step in plan.slots}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_differs_in_its_wrap_slot_only(family: str) -> None:
    first, *others = (settings(FOLDER / f"{family}_{name}.yaml") for name in FAMILIES[family])
    for other in others:
        assert other.keys() == first.keys()
        different = {slot for slot in first if other[slot] != first[slot]}
        assert different == {"wrap"}


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_is_another_slot_and_other_rates(name: str) -> None:
    adapted, plain = (settings(FOLDER / f"{one}.yaml") for one in (name, ADAPTED[name]))
    different = {slot for slot in plain if adapted[slot] != plain[slot]}
    assert (different, adapted.keys() - plain.keys()) == ({"optimizer"}, {"adapter"})


def test_recipes_validate_against_the_schema_for_editors() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "pipetrain", "schema"], capture_output=True, text=True, check=True
    )
    schema = json.loads(said.stdout)
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    for path in RECIPES:
        validator(schema).validate(yaml.safe_load(path.read_text("utf-8")))
