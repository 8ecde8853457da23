"""Unknown keys: where they belong, and what other tools' keys are called here."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.chain.elsewhere import explained
from pipeline.chain.registry import Registry
from pipeline.errors import COMMAND_LINE, Location, Problem
from pipeline.recipe import load_recipe
from pipeline.recipe.unknown import UnknownKey

RECIPE = """\
name: a
stages:
  weights: {use: model.hf}
  optimizer: {use: optimizer.adamw}
  wrap: {use: wrap.ddp}
  loop: {use: train.causal_lm}
"""


def hint(tmp_path: Path, key: str, value: object = 1, *, command_line: bool = False) -> str:
    """Return the hint for a dotted key of a recipe, or of an override."""
    (tmp_path / "r.yaml").write_text(RECIPE)
    slot, _, field = key.rpartition(".")
    place = Location(file=f"{COMMAND_LINE}override 1" if command_line else "r.yaml", line=1)
    path = ("stages", slot, field) if slot else (field,)
    problem: Problem = UnknownKey(message="unknown field", location=place, path=path, value=value)
    recipe = load_recipe(tmp_path / "r.yaml")
    return explained([problem], recipe, Registry.installed())[0].hint


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("loop.lr", 1e-4, "`lr` belongs to slot `optimizer`"),
        ("loop.seed", 1, "`seed` stands at the top of a recipe, not in a slot"),
        ("wrap.stage", 3, "`stage` is a field of wrap.zero"),
        # slots have names of their own: `loop` is the one with a train stage
        ("optimizer.num_train_epochs", 3, "write `epochs: 3` in slot `loop`"),
        ("loop.per_device_train_batch_size", 2, "write `micro_batch_size: 2`"),
        (
            "optimizer.bf16",
            True,
            "write a slot `precision: {use: precision.policy, compute: bf16}`",
        ),
        ("weights.fp16", False, "leave it out: it is not set, or off"),
        ("fp16", True, "write a slot `precision: {use: precision.policy, compute: fp16}`"),
        ("nproc_per_node", 8, "write `launch: {procs: 8}` at the top of the recipe"),
        ("loop.dataloader_pin_memory", True, ""),
        ("loop.nothing_like_it", 1, ""),
    ],
)
def test_in_a_file(tmp_path: Path, key: str, value: object, words: str) -> None:
    assert hint(tmp_path, key, value) == words


def test_on_the_command_line(tmp_path: Path) -> None:
    assert hint(tmp_path, "lr", 1e-4, command_line=True) == "write optimizer.lr=0.0001"
    assert hint(tmp_path, "max_steps", 9, command_line=True) == "write loop.steps=9"


def test_a_field_that_is_missing_because_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    unknown = UnknownKey(
        message="unknown field", path=("stages", "loop", "max_steps"), value=3, key="loop.max_steps"
    )
    missing = Problem(message="is required", key="loop.steps")
    other = Problem(message="is required", key="loop.global_batch_size")
    recipe = load_recipe(tmp_path / "r.yaml")
    found = explained([missing, unknown, other], recipe, Registry.installed())
    assert [one.key for one in found] == ["loop.max_steps", "loop.global_batch_size"]
