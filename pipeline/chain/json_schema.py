"""The JSON Schema of recipes, composed from installed stages, for editors and other checkers.

Says what `pipe check` says of single values; the chain of stages is beyond a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from pipeline.chain.registry import Registry
from pipeline.contracts.signature import needs
from pipeline.recipe.fields import WithDocs, adapter
from pipeline.recipe.load import HEADER_KEYS, SLOT, RecipeSettings
from pipeline.recipe.nodes import TAKES, USE

REFERENCE = {"type": "string", "pattern": r"\$\{", "description": "an interpolation: ${...}"}
CHAIN = "The chain: slot name -> stage and its fields, in the order they run."


def recipe_schema(registry: Registry) -> dict[str, Any]:
    """Draft 2020-12. Raises PluginError when an installed stage cannot be loaded.

    A file that `extends` others may leave out whatever they can hold."""
    names = registry.names()
    header = _of(adapter(RecipeSettings), "#/$defs/{model}")
    definitions, required = header.pop("$defs", {}), {}
    for name in names:
        # each stage keeps its own definitions: two may have dataclasses of one name
        part = _of(adapter(registry.load(name)), f"#/$defs/{name}/$defs/{{model}}")
        required[name] = part.pop("required", [])
        own = {USE: {"const": name}, TAKES: _takes(registry.load(name))}
        definitions[name] = {**part, "properties": {**own, **part.get("properties", {})}}
    filled = {name: {"required": fields} for name, fields in required.items() if fields}
    complete = {"required": ["use"], **_each(filled)}
    slot = {
        "type": ["object", "null"],
        "properties": {"use": {"enum": names, "description": "The stage's name."}},
        **_each({name: {"$ref": f"#/$defs/{name}"} for name in names}),
    }
    files = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pipetrain recipe",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{name: header["properties"][name] for name in HEADER_KEYS},
            "extends": {**files, "description": "Files that this one is laid over, in order."},
            "stages": {
                "type": "object",
                "description": CHAIN,
                "propertyNames": {"pattern": f"^{SLOT.pattern}$"},
                "minProperties": 1,
                "additionalProperties": slot,
            },
        },
        "if": {"not": {"required": ["extends"]}},
        "then": {
            "required": ["name", "stages"],
            "properties": {"stages": {"additionalProperties": complete}},
        },
        "$defs": definitions,
    }


def _each(then: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Conditions on a slot by the stage that it uses; empty without any."""
    branches = [
        {
            "if": {"type": "object", "properties": {"use": {"const": name}}, "required": ["use"]},
            "then": schema,
        }
        for name, schema in then.items()
    ]
    return {"allOf": branches} if branches else {}


def _takes(stage: type) -> dict[str, Any]:
    types = {need.parameter: ["string", "null"][: 1 + need.optional] for need in needs(stage)}
    return {
        "description": "The slots whose results it takes, where another than the latest is meant.",
        "type": "object",
        "properties": {parameter: {"type": kinds} for parameter, kinds in types.items()},
        "additionalProperties": False,
    }


def _of(kind: TypeAdapter[Any], references: str) -> dict[str, Any]:
    return _open_to_references(kind.json_schema(ref_template=references, schema_generator=WithDocs))


def _open_to_references(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with an interpolation allowed in the place of every value in it."""
    result = {key: value for key, value in schema.items() if key != "title"}
    for key, inner in result.items():
        if key in ("properties", "$defs"):
            wrap = _or_reference if key == "properties" else _open_to_references
            result[key] = {name: wrap(child) for name, child in inner.items()}
        elif key in ("items", "additionalProperties") and isinstance(inner, dict):
            result[key] = _or_reference(inner)
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            result[key] = [_open_to_references(child) for child in inner]
    return result


def _or_reference(schema: dict[str, Any]) -> dict[str, Any]:
    opened = _open_to_references(schema)
    keys = [key for key in ("description", "default") if key in opened]
    outside: dict[str, Any] = {key: opened.pop(key) for key in keys}
    return {"anyOf": [opened, REFERENCE], **outside}
