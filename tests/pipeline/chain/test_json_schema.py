"""The JSON Schema agrees with the recipe reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from pipeline.chain.json_schema import recipe_schema
from pipeline.chain.registry import Registry
from pipeline.cli import main
from pipeline.recipe.includes import Sources
from pipeline.recipe.load import TOP_LEVEL
from pipeline.recipe.nodes import plain

RECIPES = sorted((Path(__file__).parents[3] / "recipes").rglob("*.yaml"))
GOOD: dict[str, Any] = {
    "name": "good",
    "seed": 1,
    "launch": {"procs": 2, "device": "cpu"},
    "stages": {
        "model": {"use": "model.fake", "path": None},
        "data": {"use": "data.text", "files": ["a.txt"]},
        "wrap": {"use": "wrap.red", "offload": {"device": "cpu"}, "extra": {"anything": [1]}},
        "train": {"use": "train.lm", "steps": 3},
    },
}


@pytest.fixture
def fakes(registry: Registry) -> Draft202012Validator:
    working = [entry for entry in registry.entries() if not entry.name.startswith("broken")]
    schema = recipe_schema(Registry(working))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def changed(path: str, value: object) -> dict[str, Any]:
    recipe: dict[str, Any] = json.loads(json.dumps(GOOD))
    *above, last = path.split(".")
    below = recipe
    for part in above:
        below = below[part]
    below[last] = value
    return recipe


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", 1),
        ("seed", "${oc.env:SEED}"),
        ("launch", "${other}"),
        ("stages.train.steps", "${seed}"),
        ("stages.data.files", "${stages.other.files}"),
        ("stages.data.files", ["a", "${seed}.txt"]),
        ("stages.wrap.offload", {"device": "${x}"}),
        ("stages.wrap", None),
        ("stages.wrap.takes", {"model": "model"}),
        ("stages.train.takes", {"checkpoints": None}),
        ("extends", "base.yaml"),
    ],
)
def test_accepts(fakes: Draft202012Validator, path: str, value: object) -> None:
    assert list(fakes.iter_errors(changed(path, value))) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", -1),
        ("seed", "one"),
        ("name", "my run"),
        ("naem", "x"),
        ("launch", {"prcs": 1}),
        ("launch.device", "tpu"),
        ("stages", {}),
        ("stages.Wrap", {"use": "wrap.red"}),
        ("stages.wrap", "wrap.red"),
        ("stages.wrap", {"stage": 2}),
        ("stages.wrap.use", "wrap.green"),
        ("stages.wrap.use", "wrap.blue"),
        ("stages.wrap.stagee", 2),
        ("stages.wrap.stage", 4),
        ("stages.wrap.takes", {"modle": "model"}),
        ("stages.wrap.takes", {"model": None}),
        ("stages.wrap.takes", ["model"]),
        ("stages.wrap.offload", {"devise": "cpu"}),
        ("stages.train", {"use": "train.lm"}),
        ("stages.train.steps", 0),
        ("stages.train.steps", "5"),
        ("stages.data.files", "a.txt"),
    ],
)
def test_refuses(fakes: Draft202012Validator, path: str, value: object) -> None:
    assert not fakes.is_valid(changed(path, value))


def test_an_overlay_may_be_partial(fakes: Draft202012Validator) -> None:
    overlay = {"extends": ["a.yaml"], "stages": {"train": {"use": "train.lm"}, "wrap": {}}}
    assert list(fakes.iter_errors(overlay)) == []


def test_fields_are_documented(fakes: Draft202012Validator) -> None:
    definition = fakes.schema["$defs"]["model.fake"]
    assert definition["properties"]["layers"]["description"] == "How many."
    assert definition["properties"]["layers"]["default"] == 2
    assert "More words" in definition["description"]


def test_the_command_names_a_stage_that_cannot_be_loaded(pipe: Callable[..., Result]) -> None:
    result = pipe("schema")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: stage `broken.missing` of faulty-plugin 1.0")


@pytest.fixture(scope="module")
def installed() -> Draft202012Validator:
    result = CliRunner().invoke(main, ["schema"])
    assert result.exit_code == 0, result.output
    schema = json.loads(result.stdout)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_installed_stages_have_a_schema(installed: Draft202012Validator) -> None:
    text = "name: r\nstages: {wrap: {use: wrap.zero, stage: 9}}"
    (error,) = installed.iter_errors(yaml.safe_load(text))
    assert list(error.absolute_path) == ["stages", "wrap", "stage"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_fit(installed: Draft202012Validator, recipe: Path) -> None:
    sources = Sources(TOP_LEVEL)
    tree = sources.read(recipe)
    assert tree is not None
    assert sources.problems == []
    errors = [f"{error.json_path}: {error.message}" for error in installed.iter_errors(plain(tree))]
    assert errors == []
