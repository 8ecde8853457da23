"""Paths that were given for a recipe, and are none: what was meant."""

from __future__ import annotations

from pathlib import Path

from pipeline.recipe.shipped import shipped
from pipeline.utils.text import closest, near_path, shown_path

RUN_RECIPE = "recipe.yaml"
RECIPES = (".yaml", ".yml")
DATA = (".jsonl", ".parquet", ".txt", ".csv", ".gz", ".zst", ".arrow")
WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt")
OTHER_TOOLS = "pipe import translates files of the Trainer, TRL, axolotl, accelerate and DeepSpeed"


def hint_for(path: Path) -> str:
    """Return what to do about a recipe that cannot be read."""
    name = shown_path(path)
    if path.is_dir():
        return _folder(path, name)
    if "=" in path.name:
        return "the recipe comes first: pipe run RECIPE path=value"
    for suffix in RECIPES:
        if path.with_name(path.name + suffix).is_file():
            return f"did you mean {name}{suffix}?"
    known = shipped()
    ours = path.stem if path.stem in known else None
    near = "" if ours else near_path(path, RECIPES)
    ours = ours or (None if near else closest(path.stem, known))
    return near if ours is None else _shipped(ours, known[ours])


def _shipped(name: str, file: Path) -> str:
    below = file.is_relative_to(Path.cwd())
    return (
        f"did you mean {shown_path(file)}?" if below else f"pipe cp {name} copies that recipe here"
    )


def _folder(path: Path, name: str) -> str:
    if (path / RUN_RECIPE).is_file():
        return f"it is a run: pipe resume {name} continues it, {name}/{RUN_RECIPE} is its recipe"
    if (path / "config.json").is_file() or any(path.glob("*.gguf")):
        return f"it is a model: pipe init --model {name} writes a recipe"
    found = sorted(path.glob("*.yaml"))
    return f"name a file in it, such as {shown_path(found[0])}" if found else "name a file"


def other_kind(path: Path) -> str:
    """Return what to do with a file that is no recipe."""
    if path.suffix in DATA or path.suffix == ".json":
        init = f"it looks like data: pipe init --data {shown_path(path)} writes a recipe"
        return init if path.suffix != ".json" else f"{init}; {OTHER_TOOLS}"
    if path.suffix in WEIGHTS:
        return f"it looks like a model: pipe init --model {shown_path(path)} writes a recipe"
    return OTHER_TOOLS
