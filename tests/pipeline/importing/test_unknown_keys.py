"""Keys of other tools in a recipe: every hint can be followed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.chain.elsewhere import Slots, explained
from pipeline.chain.plan import plan_file
from pipeline.chain.registry import Registry
from pipeline.errors import COMMAND_LINE, Location, Problem, RecipeError
from pipeline.importing.translator import installed_translators
from pipeline.importing.unknown_keys import of_other_tools
from pipeline.recipe import load_recipe
from pipeline.recipe.unknown import MissingKey, UnknownKey
from stages.importing.reader import TABLES
from stages.importing.untranslated import KEYS

RECIPE = """\
name: a
stages:
  weights: {use: model.hf, path: owner/name}
  data: {use: data.text, files: a.txt}
  optimizer: {use: optimizer.adamw, lr: 0.1}
  wrap: {use: WRAP}
  loop: {use: train.causal_lm, steps: 1, global_batch_size: 1}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "r.yaml"
    path.write_text(RECIPE.replace("WRAP", "wrap.fsdp"))
    return path


def hint(file: Path, key: str, value: object, *, command_line: bool = False) -> str:
    """Return the hint for a dotted key of a recipe, or of an override."""
    slot, _, field = key.rpartition(".")
    place = Location(file=f"{COMMAND_LINE}override 1" if command_line else "r.yaml", line=1)
    path = ("stages", slot, field) if slot else (field,)
    problem: Problem = UnknownKey(message="unknown field", location=place, path=path, value=value)
    return explained([problem], load_recipe(file), Registry.installed(), of_other_tools)[0].hint


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        # slots have names of their own: `loop` is the one with a train stage
        ("optimizer.num_train_epochs", 3, "write `epochs: 3` in slot `loop` instead of `steps`"),
        ("loop.per_device_train_batch_size", 2, "write `micro_batch_size: 2`"),
        (
            "loop.batch_size",
            2,
            "per device: `micro_batch_size: 2`, over all: `global_batch_size: 2`",
        ),
        (
            "optimizer.bf16",
            True,
            "write a slot `precision: {use: precision.policy, compute: bf16}` before `wrap`",
        ),
        ("weights.fp16", False, "leave it out: it is not set, or off"),
        (
            "fp16",
            True,
            "write a slot `precision: {use: precision.policy, compute: fp16}` before `wrap`",
        ),
        ("nproc_per_node", 8, "write `launch: {procs: 8}` at the top of the recipe"),
        ("strategy", "deepspeed_stage_2", "write `use: wrap.zero` in slot `wrap`"),
        ("wrap.tp_size", 2, "write `tensor_parallel: {size: 2}`"),
        # torchtune, where one key counts in a block with another only
        ("clip_grad_norm", 1.0, "write `max_grad_norm: 1.0` in slot `optimizer`"),
        (
            "enable_activation_checkpointing",
            True,
            "write `activation_checkpointing: {}` in slot `weights`",
        ),
        ("optimizer.num_warmup_steps", 10, "write `warmup_steps: 10`"),
        # values that the field does not take
        ("strategy", "auto", "here that is `wrap.use`"),
        ("devices", "auto", "here that is `launch.procs`"),
        ("devices", -1, "here that is `launch.procs`"),
        ("accelerator", "tpu", "here that is `launch.device`"),
        ("wrap.data_parallel_shard_degree", -1, "here that is `wrap.shard_size`"),
        ("loop.dataloader_pin_memory", True, ""),
        ("weights.interval", 5, ""),
    ],
)
def test_in_a_file(file: Path, key: str, value: object, words: str) -> None:
    assert hint(file, key, value) == words


def test_on_the_command_line(file: Path) -> None:
    assert hint(file, "max_steps", 9, command_line=True) == "write loop.steps=9"
    # an override cannot add a slot
    assert hint(file, "fp16", True, command_line=True).startswith(
        "add to the recipe a slot `precision: {"
    )


def test_a_field_that_the_slot_s_stage_does_not_have(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "r.yaml"
    other.write_text(RECIPE.replace("WRAP", "wrap.ddp"))
    said = "`tensor_parallel` is a field of wrap.fsdp and wrap.zero"
    assert hint(other, "wrap.tp_size", 2) == said
    # a translator's refusal is about the other tool's file
    assert hint(other, "loop.tensor_parallel", 2) == said


def test_a_field_that_is_missing_because_of_its_name(file: Path) -> None:
    unknown = UnknownKey(
        message="unknown field", path=("stages", "loop", "max_steps"), value=3, key="loop.max_steps"
    )
    missing = MissingKey(message="is required", key="loop.steps")
    found = explained([missing, unknown], load_recipe(file), Registry.installed(), of_other_tools)
    assert [one.key for one in found] == ["loop.max_steps"]


def names(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a table, and of the tables in it."""
    for key, inner in table.items():
        yield key
        if isinstance(inner, Mapping):
            yield from names(inner)


TRANSLATED = [*TABLES.values(), KEYS, *(getattr(t, "table", {}) for t in installed_translators())]
ALL = sorted({key for table in TRANSLATED for key in names(table)} - {"name", "seed", "env"})
VALUES: list[Any] = [
    1, 2, 0, -1, 0.5, True, False, None, "auto", "cpu", "tpu", "full", "ddp", "fsdp", "deepspeed",
    "cosine", "adamw_torch", "8e-5", "steps", "epoch", [], [1, 2], ["a"], {}, {"size": 2},
]  # fmt: skip


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(ALL), value=st.sampled_from(VALUES), slot=st.sampled_from(["", "loop"]))
@example(key="devices", value=-1, slot="")
def test_every_hint_names_a_field_and_a_value_that_it_takes(
    file: Path, key: str, value: Any, slot: str
) -> None:
    place = Location(file=f"{COMMAND_LINE}override 1")
    path = ("stages", slot, key) if slot else (key,)
    unknown = UnknownKey(message="unknown field", location=place, path=path, value=value)
    said, _ = of_other_tools(unknown, Slots(load_recipe(file), Registry.installed()))
    if said.startswith("write ") and "`" not in said and "..." not in said:
        follow(file, shlex.split(said.removeprefix("write ")))
    for slot_, text in re.findall(r"a slot `(\w+): ({.*?})`", said):
        follow(file, [], {slot_: yaml.safe_load(text)})


def follow(file: Path, overrides: list[str], slots: Mapping[str, Any] | None = None) -> None:
    """Do what a hint says, after which a field can still be missing, or not go with another."""
    recipe = yaml.safe_load(file.read_text())
    recipe["stages"] |= slots or {}
    other = file.with_name("followed.yaml")
    other.write_text(yaml.safe_dump(recipe, sort_keys=False))
    try:
        plan_file(other, overrides, ran=True)
    except RecipeError as error:
        wrong = r"unknown|must be|override|no value|there is no stage|not YAML"
        for one in error.problems:
            assert not isinstance(one, UnknownKey), one
            assert isinstance(one, MissingKey) or not re.match(wrong, one.message), one
