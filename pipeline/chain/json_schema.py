"""The JSON Schema of recipes, composed from installed stages, for editors and other checkers.

Says what `pipe check` says of single values; the chain of stages is beyond a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.chain.registry import Registry
from pipeline.contracts.signature import needs
from pipeline.recipe.fields import WithDocs, adapter
from pipeline.recipe.load import HEADER_KEYS, SLOT, RecipeSettings
from pipeline.recipe.nodes import TAKES, USE

REFERENCE = {"type": "string", "pattern": r"\$\{", "description": "an interpolation: ${...}"}
TAKES_DOC = "The slots whose results it takes, where another than the latest is meant."
CHAIN = "The chain: slot name -> stage and its fields, in the order they run."


def recipe_schema(registry: Registry) -> dict[str, Any]:
    """Draft 2020-12. Raises PluginError when an installed stage cannot be loaded.

    A file that `extends` others may leave out whatever they can hold."""
    names = registry.names()
    header = _of(RecipeSettings, "#/$defs/{model}")
    definitions, required = header.pop("$defs", {}), {}
    for name in names:
        # each stage keeps its own definitions: two may have dataclasses of one name
        stage = registry.load(name)
        part = _of(stage, f"#/$defs/{name}/$defs/{{model}}")
        required[name] = part.pop("required", [])
        wires = {need.parameter: ["string", "null"][: 1 + need.optional] for need in needs(stage)}
        takes = {
            "description": TAKES_DOC,
            "type": "object",
            "properties": {parameter: {"type": kinds} for parameter, kinds in wires.items()},
            "additionalProperties": False,
        }
        own = {USE: {"const": name}, TAKES: takes}
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


def _of(kind: type, references: str) -> dict[str, Any]:
    """The schema of a dataclass, with an interpolation allowed in the place of every value."""
    schema = adapter(kind).json_schema(ref_template=references, schema_generator=WithDocs)
    return _opened(schema)


def _opened(schema: dict[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """The schema with an interpolation allowed in the place of every value in it, or also in its
    own place, the `whole`."""
    result = {key: value for key, value in schema.items() if key != "title"}
    for key, inner in result.items():
        if key in ("properties", "$defs"):
            wrap = key == "properties"
            result[key] = {name: _opened(child, whole=wrap) for name, child in inner.items()}
        elif key in ("items", "additionalProperties") and isinstance(inner, dict):
            result[key] = _opened(inner, whole=True)
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            result[key] = [_opened(child) for child in inner]
    if not whole:
        return result
    keys: list[str] = [key for key in ("description", "default") if key in result]
    outside = {key: result.pop(key) for key in keys}
    return {"anyOf": [result, REFERENCE], **outside}
