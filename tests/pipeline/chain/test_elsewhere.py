"""Unknown keys: where they belong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.chain.elsewhere import explained
from pipeline.chain.registry import Registry
from pipeline.errors import COMMAND_LINE, Location, Problem
from pipeline.recipe import load_recipe
from pipeline.recipe.nodes import MissingKey, UnknownKey

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
        # the own kind's stages come before others
        ("loop.tensor_parallel", 2, "`tensor_parallel` is a field of wrap.fsdp and wrap.zero"),
        ("targets", "all-linear", "`targets` is a field of adapter.lora"),
        ("loop.nothing_like_it", 1, ""),
    ],
)
def test_in_a_file(tmp_path: Path, key: str, value: object, words: str) -> None:
    assert hint(tmp_path, key, value) == words


def test_on_the_command_line(tmp_path: Path) -> None:
    assert hint(tmp_path, "lr", 1e-4, command_line=True) == "write optimizer.lr=0.0001"


def test_a_field_that_is_missing_because_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    unknown = UnknownKey(
        message="unknown field", path=("stages", "loop", "stepz"), closest="steps", key="loop.stepz"
    )
    missing = MissingKey(message="is required", key="loop.steps")
    other = MissingKey(message="is required", key="loop.global_batch_size")
    recipe = load_recipe(tmp_path / "r.yaml")
    found = explained([missing, unknown, other], recipe, Registry.installed())
    assert [one.key for one in found] == ["loop.stepz", "loop.global_batch_size"]
