"""Which configuration keys the installed DeepSpeed knows, read from its source.

DeepSpeed silently ignores an unknown top-level key. Importing it to ask takes seconds and brings
torch along, too much for a check, so its configuration modules are parsed instead.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LOADER = "runtime/config.py"
"""Where DeepSpeed turns a configuration into settings, in a class's method `_initialize_params`."""
ZERO_MODELS = (
    "runtime/zero/config.py",
    "runtime/zero/offload_config.py",
    "runtime/zero/leaf_module_config.py",
    "runtime/zenflow/zenflow_config.py",
)
ZERO_MODEL = "DeepSpeedZeroConfig"

Function = ast.FunctionDef | ast.ClassDef


@dataclass
class Sources:
    """Functions, classes and string constants of DeepSpeed's configuration modules, by name."""

    functions: dict[str, Function] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)


@functools.cache
def top_level_keys() -> frozenset[str]:
    """Keys that DeepSpeed reads at the top of a configuration; empty when it is not installed."""
    root = _root()
    if root is None:
        return frozenset()
    sources = Sources()
    _collect(root / LOADER, root, sources, depth=2)
    start = sources.functions["_initialize_params"]
    return frozenset(_keys_read(start, "param_dict", sources, seen=set()))


@functools.cache
def zero_keys() -> Mapping[str, Mapping[str, object] | None]:
    """Keys of `zero_optimization`, both spellings; nested blocks map to theirs, values to None."""
    root = _root()
    if root is None:
        return {}
    models: dict[str, ast.ClassDef] = {}
    for name in ZERO_MODELS:
        for node in _parse(root / name).body:
            if isinstance(node, ast.ClassDef):
                models[node.name] = node
    return _model_keys(ZERO_MODEL, models)


def _root() -> Path | None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _collect(path: Path, root: Path, sources: Sources, *, depth: int) -> None:
    tree = _parse(path)
    constants: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            sources.functions.setdefault(node.name, node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    constants[target.id] = node.value.value
        elif isinstance(node, ast.ImportFrom) and depth > 0:
            imported = _imported(node, path, root)
            if imported is not None:
                _collect(imported, root, sources, depth=depth - 1)
    sources.constants = constants | sources.constants


def _imported(node: ast.ImportFrom, path: Path, root: Path) -> Path | None:
    """The configuration or constants module that an import names, None for any other."""
    parts = (node.module or "").split(".")
    if node.level:
        base = path.parents[node.level - 1]
    elif parts[0] == "deepspeed":
        base, parts = root, parts[1:]
    else:
        return None
    target = base.joinpath(*parts).with_suffix(".py") if parts else base / "__init__.py"
    wanted = "config" in target.stem or "constants" in target.stem
    return target if wanted and target.is_file() else None


def _keys_read(function: Function, name: str, sources: Sources, *, seen: set[str]) -> Iterator[str]:
    """Keys read from the mapping called `name` in `function`, and in functions it is passed to."""
    seen.add(function.name)
    for node in ast.walk(function):
        for key in _keys_at(node, name):
            yield from _literals(key, function, sources)
        if isinstance(node, ast.Call) and _is_passed(node, name):
            called = (
                sources.functions.get(node.func.id) if isinstance(node.func, ast.Name) else None
            )
            if called is not None and called.name not in seen:
                yield from _keys_read(called, _first_parameter(called), sources, seen=seen)


def _keys_at(node: ast.AST, name: str) -> Iterator[ast.expr]:
    if isinstance(node, ast.Subscript) and _is_name(node.value, name):
        yield node.slice
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        held = node.comparators[0]
        if isinstance(held, ast.Call) and isinstance(held.func, ast.Attribute):
            held = held.func.value  # `in mapping.keys()`
        if _is_name(held, name):
            yield node.left
    elif isinstance(node, ast.Call) and node.args:
        function = node.func
        if isinstance(function, ast.Attribute) and _is_name(function.value, name):
            yield node.args[0]  # mapping.get(key)
        elif _is_name(node.args[0], name) and len(node.args) > 1:
            yield node.args[1]  # get_scalar_param(mapping, key, default)


def _literals(key: ast.expr, function: Function, sources: Sources) -> Iterator[str]:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        yield key.value
    elif isinstance(key, ast.Name) and key.id in sources.constants:
        yield sources.constants[key.id]
    elif isinstance(key, ast.Name):
        for loop in ast.walk(function):
            if isinstance(loop, ast.comprehension) and _is_name(loop.target, key.id):
                for item in getattr(loop.iter, "elts", ()):
                    yield from _literals(item, function, sources)


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_passed(call: ast.Call, name: str) -> bool:
    return bool(call.args) and _is_name(call.args[0], name)


def _first_parameter(function: Function) -> str:
    if isinstance(function, ast.ClassDef):
        inits = [
            n for n in function.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"
        ]
        return inits[0].args.args[1].arg if inits else ""
    return function.args.args[0].arg


def _model_keys(
    name: str, models: Mapping[str, ast.ClassDef]
) -> dict[str, Mapping[str, object] | None]:
    keys: dict[str, Mapping[str, object] | None] = {}
    for node in models[name].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        nested = [n.id for n in ast.walk(node.annotation) if isinstance(n, ast.Name)]
        inner = next((_model_keys(n, models) for n in nested if _is_model(n, models)), None)
        for spelling in (node.target.id, *_aliases(node.value)):
            keys[spelling] = inner
    return keys


def _is_model(name: str, models: Mapping[str, ast.ClassDef]) -> bool:
    bases = models[name].bases if name in models else []
    return any(isinstance(base, ast.Name) and base.id.endswith("Model") for base in bases)


def _aliases(value: ast.expr | None) -> Iterator[str]:
    for keyword in value.keywords if isinstance(value, ast.Call) else ():
        if keyword.arg == "alias" and isinstance(keyword.value, ast.Constant):
            yield str(keyword.value.value)
