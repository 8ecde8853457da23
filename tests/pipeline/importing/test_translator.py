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

from pipeline.chain.elsewhere import Slots, explained, read_elsewhere
from pipeline.chain.plan import plan_file
from pipeline.chain.registry import Registry
from pipeline.errors import COMMAND_LINE, Location, Problem, RecipeError
from pipeline.importing.translator import installed_translators, of_other_tools, plan_recipe
from pipeline.recipe import load_recipe
from pipeline.recipe.dump import render
from pipeline.recipe.nodes import MissingKey, UnknownKey
from stages.importing.hugging_face import KINDS, TABLES
from tests.support.tier import times

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
        ("weights.fp16", False, "leave it out: false is the default"),
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
        ("loop.dataloader_prefetch_factor", 2, ""),
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


def hints(file: Path, keys: Mapping[str, object]) -> list[str]:
    """Return the hints for keys of the slot `loop` that one recipe has."""
    unknown: list[Problem] = [
        UnknownKey(message="unknown field", path=("stages", "loop", key), value=value)
        for key, value in keys.items()
    ]
    found = explained(unknown, load_recipe(file), Registry.installed(), of_other_tools)
    return [one.hint for one in found]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"eval_strategy": "steps", "eval_steps": 10}, "write `eval_every: 10`"),
        ({"eval_steps": 10, "eval_strategy": "steps"}, "write `eval_every: 10`"),
        ({"eval_steps": 10, "learning_rate": "fast"}, "write `eval_every: 10`"),
        (
            {"lora_r": 16, "lora_alpha": 32},
            "write a slot `adapter: {use: adapter.lora, rank: 16, alpha: 32}` after `weights`",
        ),
        (
            {"lora_alpha": 32, "lora_r": 16},
            "write a slot `adapter: {use: adapter.lora, alpha: 32, rank: 16}` after `weights`",
        ),
        (
            {"dataset_name": "a/b", "dataset_config": "c"},
            "write `sources: [{dataset: a/b, config: c, split: train}]` in slot `data`",
        ),
        (
            {"save_steps": 10, "save_strategy": "epoch"},
            "leave it out: it has no effect with the other settings",
        ),
        # two that contradict are read one by one
        ({"max_length": 8, "max_seq_length": 9}, "write `sequence_length: 8` in slot `data`"),
    ],
)
def test_keys_are_read_together(file: Path, keys: Mapping[str, object], words: str) -> None:
    assert hints(file, keys)[0] == words


@pytest.mark.parametrize("slot", ["lora", "peft"])
def test_a_slot_without_use(tmp_path: Path, slot: str) -> None:
    recipe = tmp_path / "r.yaml"
    fields = "{r: 8, lora_alpha: 16, bias: none}"
    recipe.write_text(f"{RECIPE.replace('WRAP', 'wrap.fsdp')}  {slot}: {fields}\n")
    with pytest.raises(RecipeError) as error:
        plan_recipe(recipe)
    found = {one.key: one.hint for one in error.value.problems if one.key.startswith(slot)}
    assert found.pop(f"{slot}.use").startswith("add `use: adapter.lora`")
    assert found == {
        f"{slot}.r": "write `rank: 8`",
        f"{slot}.lora_alpha": "write `alpha: 16`",
        f"{slot}.bias": "leave it out: every recipe does this",
    }


def test_advice_is_about_values(file: Path) -> None:
    assert hint(file, "loop.label_smoothing_factor", 0.1).startswith(
        "leave it out: recipes have no"
    )
    assert hint(file, "loop.label_smoothing_factor", 0) == "leave it out: 0 is the default"
    assert hint(file, "loop.group_by_length", False) == "leave it out: false is the default"
    assert hint(file, "wrap.deepspeed", {"zero_optimization": {"stage": 2}}) == (
        "its settings stand in slot `wrap` with `use: wrap.zero`: `pipe import config.yaml ...` "
        "translates both"
    )
    # also in a block of a header
    path = ("launch", "timeouts", "nccl")
    nccl = UnknownKey(message="unknown field", path=path, value=60)
    found = explained([nccl], load_recipe(file), Registry.installed(), of_other_tools)
    assert found[0].hint == "here that is `collectives`"


def names(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a table, and of the tables in it."""
    for key, inner in table.items():
        yield key
        if isinstance(inner, Mapping):
            yield from names(inner)


TRANSLATED = [TABLES[name] for name in (*KINDS.values(), "keys")]
TRANSLATED += [getattr(t, "table", {}) for t in installed_translators()]
ALL = sorted({key for table in TRANSLATED for key in names(table)} - {"name", "seed", "env"})
VALUES: list[Any] = [
    1, 2, 0, -1, 0.5, True, False, None, "auto", "cpu", "tpu", "full", "ddp", "fsdp", "deepspeed",
    "cosine", "adamw_torch", "8e-5", "steps", "epoch", [], [1, 2], ["a"], {}, {"size": 2},
]  # fmt: skip


@settings(
    max_examples=times(quick=100, full=300),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(key=st.sampled_from(ALL), value=st.sampled_from(VALUES), slot=st.sampled_from(["", "loop"]))
@example(key="devices", value=-1, slot="")
def test_every_hint_names_a_field_and_a_value_that_it_takes(
    file: Path, key: str, value: Any, slot: str
) -> None:
    place = Location(file=f"{COMMAND_LINE}override 1")
    path = ("stages", slot, key) if slot else (key,)
    unknown = UnknownKey(message="unknown field", location=place, path=path, value=value)
    slots = Slots(load_recipe(file), Registry.installed())
    (((said, _), _),) = read_elsewhere([unknown], slots, of_other_tools)
    if said.startswith("write ") and "`" not in said and "..." not in said:
        follow(file, shlex.split(said.removeprefix("write ")))
    for slot_, text in re.findall(r"a slot `(\w+): ({.*?})`", said):
        follow(file, [], {slot_: yaml.safe_load(text)})


def follow(file: Path, overrides: list[str], slots: Mapping[str, Any] | None = None) -> None:
    """Do what a hint says, after which a field can still be missing, or not go with another."""
    recipe = yaml.safe_load(file.read_text())
    recipe["stages"] |= slots or {}
    other = file.with_name("followed.yaml")
    other.write_text(render(recipe, lambda path: ""))
    try:
        plan_file(other, overrides, skip_checks=True)
    except RecipeError as error:
        wrong = r"unknown|must be|override|no value|there is no stage|not YAML"
        for one in error.problems:
            assert not isinstance(one, UnknownKey), one
            assert isinstance(one, MissingKey) or not re.match(wrong, one.message), one
