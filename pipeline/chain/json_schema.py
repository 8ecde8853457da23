"""The JSON Schema of recipes, composed from installed stages, for editors and other checkers.

Says what `pipe check` says of single values; the chain of stages is beyond a schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from pipeline.chain.registry import Registry
from pipeline.contracts.signature import needs
from pipeline.recipe.fields import WithDocs, adapter
from pipeline.recipe.load import HEADER_KEYS, SLOT, RecipeSettings
from pipeline.recipe.nodes import TAKES, USE

_REFERENCE = {"type": "string", "pattern": r"\$\{", "description": "an interpolation: ${...}"}


def recipe_schema(registry: Registry) -> dict[str, Any]:
    """Draft 2020-12. Raises PluginError when an installed stage cannot be loaded.

    A file that `extends` others may leave out whatever they can hold.
    """
    # each stage keeps its own definitions: two may have dataclasses of one name
    parts = {
        name: _of(adapter(registry.load(name)), f"#/$defs/{name}/$defs/{{model}}")
        for name in registry.names()
    }
    header = _of(adapter(RecipeSettings), "#/$defs/{model}")
    definitions = header.pop("$defs", {})
    required = {name: part.pop("required", []) for name, part in parts.items()}
    for name, part in parts.items():
        definitions[name] = _with_use(name, part, registry.load(name))
    files = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pipetrain recipe",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{name: header["properties"][name] for name in HEADER_KEYS},
            "extends": {**files, "description": "Files that this one is laid over, in order."},
            "stages": _stages(list(parts)),
        },
        "if": {"not": {"required": ["extends"]}},
        "then": {
            "required": ["name", "stages"],
            "properties": {"stages": {"additionalProperties": _complete(required)}},
        },
        "$defs": definitions,
    }


def _stages(names: list[str]) -> dict[str, Any]:
    branches = [{**_if_use(name), "then": {"$ref": f"#/$defs/{name}"}} for name in names]
    slot = {
        "type": ["object", "null"],
        "properties": {"use": {"enum": names, "description": "The stage's name."}},
        "allOf": branches,
    }
    return {
        "type": "object",
        "description": "The chain: slot name -> stage and its fields, in the order they run.",
        "propertyNames": {"pattern": f"^{SLOT.pattern}$"},
        "minProperties": 1,
        "additionalProperties": slot,
    }


def _complete(required: Mapping[str, list[str]]) -> dict[str, Any]:
    """Schema of a slot in a file that extends no other."""
    branches = [
        {**_if_use(name), "then": {"required": fields}}
        for name, fields in required.items()
        if fields
    ]
    return {"required": ["use"], "allOf": branches} if branches else {"required": ["use"]}


def _if_use(name: str) -> dict[str, Any]:
    named = {"type": "object", "properties": {"use": {"const": name}}, "required": ["use"]}
    return {"if": named}


def _with_use(name: str, part: dict[str, Any], stage: type) -> dict[str, Any]:
    types = {need.parameter: ["string", "null"][: 1 + need.optional] for need in needs(stage)}
    takes = {
        "description": "The slots whose results it takes, where another than the latest is meant.",
        "type": "object",
        "properties": {parameter: {"type": kinds} for parameter, kinds in types.items()},
        "additionalProperties": False,
    }
    own = {USE: {"const": name}, TAKES: takes}
    return {**part, "properties": {**own, **part.get("properties", {})}}


def _of(kind: TypeAdapter[Any], references: str) -> dict[str, Any]:
    return _open_to_references(kind.json_schema(ref_template=references, schema_generator=WithDocs))


def _open_to_references(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with an interpolation allowed in the place of every value in it."""
    result = {key: value for key, value in schema.items() if key != "title"}
    for key in ("properties", "$defs"):
        if key in schema:
            wrap = _or_reference if key == "properties" else _open_to_references
            result[key] = {name: wrap(child) for name, child in schema[key].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = _or_reference(schema[key])
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if key in schema:
            result[key] = [_open_to_references(child) for child in schema[key]]
    return result


def _or_reference(schema: dict[str, Any]) -> dict[str, Any]:
    opened = _open_to_references(schema)
    outside: dict[str, Any] = {
        key: opened.pop(key) for key in ("description", "default") if key in opened
    }
    return {"anyOf": [opened, _REFERENCE], **outside}
