"""Commands in the documents exist, with these options and arguments; recipes in them are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from pipeline.chain.json_schema import recipe_schema
from pipeline.chain.plan import plan_file
from pipeline.chain.registry import Registry, kind_of
from pipeline.cli import COMMANDS, main
from tests.docs.blocks import DOCUMENTS, ROOT, Command, blocks, commands, name

ALL = [command for document in DOCUMENTS for command in commands(document)]
PLACEHOLDER = re.compile(r"\[?[A-Z][A-Z.]*\]?(/.*)?")
"""RUN, `[RUN]`, RUN/checkpoints: something of the reader's."""
# A command keeps the names of its help option that its first context of this process gave it.
ROOT_CONTEXT = click.Context(main, **main.context_settings)


def command_of(words: tuple[str, ...]) -> click.Command:
    """Return the click command that a line names."""
    assert words[0] in COMMANDS, f"there is no command {words[0]}"
    found = main.get_command(ROOT_CONTEXT, words[0])
    assert found is not None
    return found


def parse(command: Command) -> None:
    """Parse options and arguments as `pipe` does; placeholders stand for any value."""
    kind = command_of(command.words)
    words = [word.strip("[]") for word in command.words[1:]]
    context = click.Context(kind, info_name=command.words[0], parent=ROOT_CONTEXT)
    values, rest, _ = kind.make_parser(context).parse_args(words)
    assert not rest, f"unexpected {rest}"
    for parameter in kind.get_params(context):
        value = values.get(parameter.name)
        real = isinstance(value, str) and not PLACEHOLDER.fullmatch(value)
        if real and isinstance(parameter.type, click.Choice | click.IntRange):
            parameter.type.convert(value, parameter, context)
        if command.whole and parameter.required:
            given = value if isinstance(value, str | tuple) else ""
            assert given, f"lacks {parameter.name}"


def test_commands_are_found() -> None:
    assert len(ALL) > 200
    assert {command.words[0] for command in ALL} == COMMANDS.keys()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_commands_of_a_document_are_those_of_the_program(document: Path) -> None:
    wrong = []
    for command in (one for one in ALL if one.document == document):
        try:
            parse(command)
        except click.BadOptionUsage as error:
            if command.whole:  # a sentence may name an option without its value
                wrong.append(f"{command}: {error.message}")
        except (click.ClickException, AssertionError) as error:
            wrong.append(f"{command}: {getattr(error, 'message', error)}")
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("run recipe.yaml --procs 2", "--procs"),
        ("launch r.yaml --target slrum --run-dir x", "slrum"),
        ("status one two", "two"),
        ("runs", "runs"),
        ("check", "lacks"),
    ],
)
def test_a_wrong_command_is_noticed(line: str, problem: str) -> None:
    wrong = Command(document=Path("x.md"), words=tuple(line.split()), whole=True)
    with pytest.raises((click.ClickException, AssertionError), match=problem):
        parse(wrong)


SHIPPED = [
    command
    for command in ALL
    if command.words[0] in ("run", "check", "plan", "bench", "show")
    and command.words[1:2]
    and command.words[1].startswith("recipes/")
    and "train.stpes=5" not in command.words
]
"""Commands about recipes of this repository."""


@pytest.mark.parametrize("command", SHIPPED, ids=str)
def test_shipped_recipes_take_the_overrides_that_are_shown(command: Command) -> None:
    file = ROOT / command.words[1]
    overrides = [word for word in command.words[2:] if re.match(r"[a-z]+[a-z._]*=", word)]
    assert plan_file(file, overrides, forecast=True).recipe.name == file.stem


def schema_of_parts() -> dict[str, Any]:
    """Return the schema of recipes with nothing required."""
    return without_required(recipe_schema(Registry.installed()))


def without_required(part: Any) -> Any:
    """Drop `required`, but where it decides which stage is meant."""
    if isinstance(part, dict):
        decides = "use" in part.get("required", ()) and "const" in str(part.get("properties"))
        kept = {k: v for k, v in part.items() if k not in ("required", "then") or decides}
        if "if" in part and "then" in part and "use" in str(part["if"]):
            kept["then"] = part["then"]
        return {key: without_required(value) for key, value in kept.items()}
    return [without_required(one) for one in part] if isinstance(part, list) else part


SCHEMA = schema_of_parts()
TOP = SCHEMA["properties"].keys()
AXES = {"tensor_parallel"}
"""Fields of a wrap slot that are shown without it."""


def with_use(slot: str, fields: Any) -> list[Any]:
    """Return the slot with each stage that it may mean, where it does not say which."""
    if not isinstance(fields, dict) or "use" in fields:
        return [fields]
    names = [name for name in Registry.installed().names() if kind_of(name) == slot]
    return [{"use": name, **fields} for name in names]


def mistakes(written: dict[str, Any]) -> list[str]:
    """Return what the schema says against a recipe, a part of one, or slots alone."""
    if written.keys() <= AXES:
        written = {"wrap": written}
    recipe = written if written.keys() <= TOP else {"stages": written}
    validator = jsonschema.Draft202012Validator(SCHEMA)
    found = [
        e.message for e in validator.iter_errors({k: v for k, v in recipe.items() if k != "stages"})
    ]
    for slot, fields in (recipe.get("stages") or {}).items():
        tried = [
            [e.message for e in validator.iter_errors({"stages": {slot: one}})]
            for one in with_use(slot, fields)
        ]
        assert tried, f"no stage for the slot {slot}"
        found += min(tried, key=len)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_recipes_in_a_document_fit_the_schema(document: Path) -> None:
    wrong = []
    for block in blocks(document, "yaml"):
        if block.note.startswith("file="):  # of another tool, or of another test
            continue
        written = yaml.safe_load(block.text)
        if isinstance(written, dict):
            wrong += [f"{block.text}: {problem}" for problem in mistakes(written)]
    assert wrong == []


def test_a_wrong_recipe_is_noticed() -> None:
    (unknown,) = mistakes({"wrap": {"use": "wrap.fsdp", "shardin": "full_shard"}})
    assert "shardin" in unknown
    (unknown,) = mistakes({"train": {"stpes": 3}})
    assert "stpes" in unknown
    (kind,) = mistakes({"launch": {"procs": "eight"}})
    assert "eight" in kind


WHOLE = [
    pytest.param(block.text, id=f"{name(document)}-{number}")
    for document in DOCUMENTS
    for number, block in enumerate(blocks(document, "yaml"))
    if block.text.startswith("name:") and "consolidate" in block.text
]


@pytest.mark.parametrize("text", WHOLE)
def test_whole_recipes_pass_the_check(text: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    for needed in ("my-model/config.json", "train.jsonl"):
        (tmp_path / needed).parent.mkdir(exist_ok=True)
        (tmp_path / needed).write_text('{"model_type": "llama"}\n')
    made = plan_file(file, forecast=True)
    assert [step.slot for step in made.slots][-1] == "export"


def test_there_are_whole_recipes() -> None:
    assert len(WHOLE) >= 2
