"""Read a recipe's file and, in order, the files it extends; the recipes that are shipped."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import pipeline
from pipeline.errors import Location, Problem
from pipeline.recipe.merge import merge
from pipeline.recipe.nodes import Node
from pipeline.recipe.parse import parse
from pipeline.utils.foreign import open_regular
from pipeline.utils.terminal import typed
from pipeline.utils.text import closest, near_path, shown_path

MAX_BYTES = 1_000_000
MAX_FILES = 100
RUN_RECIPE = "recipe.yaml"
RECIPES = (".yaml", ".yml")
DATA = (".jsonl", ".parquet", ".txt", ".csv", ".gz", ".zst", ".arrow")
WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt")
OTHER_TOOLS = "pipe import translates files of the Trainer, TRL, axolotl, accelerate and DeepSpeed"


class Sources:
    """Reads files into one tree; keeps every file read and every problem found. A file without any
    of the top-level `keys` is not a recipe, and nothing in it is shown."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self.files: list[Path] = []
        """Each before the files that it overrides."""
        self.problems: list[Problem] = []

    def read(
        self, path: Path, asked: Location | None = None, chain: tuple[Path, ...] = ()
    ) -> Node | None:
        """The merged tree of `path` and what it extends; None when some file cannot be read."""
        asked = asked or Location(file=shown_path(path))
        path = Path(os.path.abspath(path))  # noqa: PTH100 - a link keeps its name
        if path in chain:
            names = " -> ".join(shown_path(link) for link in (*chain[chain.index(path) :], path))
            self._say(f"files extend each other in a circle: {names}", asked)
            return None
        if len(self.files) >= MAX_FILES:
            self._say(f"extends more than {MAX_FILES} files", asked)
            return None
        root = self._parse(path, asked)
        if root is None:
            return None
        node = root.entries().get("extends")
        bases = [] if node is None or node.value is None else [node]
        bases = node.value if node is not None and isinstance(node.value, list) else bases
        for base in bases:
            if not isinstance(base.value, str):
                self._say("extends: must be a file name or a list of file names", base.at)
        parents = [
            self.read(path.parent / base.value, base.at, (*chain, path))
            for base in reversed(bases)
            if isinstance(base.value, str)
        ]
        layers = [parent for parent in reversed(parents) if parent is not None]
        if len(layers) < len(parents):
            return None
        own = {key: node for key, node in root.entries().items() if key != "extends"}
        keys = {key: place for key, place in root.keys.items() if key != "extends"}
        layers.append(Node(value=own, at=root.at, keys=keys))
        return reduce(merge, layers, Node(value={}, at=root.at))

    def _parse(self, path: Path, asked: Location) -> Node | None:
        text, name = self._text(path, asked), shown_path(path)
        if text is None:
            return None
        root, problems = parse(
            text,
            locate=lambda line, column: Location(file=name, line=line + 1, column=column + 1),
            folder=path.parent,
        )
        if root is None and not problems:
            self._say("the recipe is empty", Location(file=name))
            return None
        if root is not None and (not problems or isinstance(root.value, dict)):
            known = not root.entries().keys().isdisjoint(self._keys)
        else:
            keys = "|".join(self._keys)
            known = re.search(rf"""^[{{"']*(?:{keys})["']?\s*:""", text, re.M) is not None
        if not known:
            # Nothing of it is shown: `extends` can name any file that this person may read.
            where = Location(file=name) if root is None else root.at
            place = (problems[0].location if problems else None) or where
            self._say("a recipe is a mapping with `name` and `stages`", place, other_kind(path))
            return None
        typed(text)
        self.problems.extend(problems)
        return root

    def _text(self, path: Path, asked: Location) -> str | None:
        try:
            with open_regular(path) as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._say(f"cannot read {shown_path(path)}: {reason}", asked, hint_for(path))
            return None
        self.files.append(path)
        if len(data) > MAX_BYTES:
            self._say(f"larger than {MAX_BYTES} bytes", Location(file=shown_path(path)))
            return None
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            column = error.start - data.rfind(b"\n", 0, error.start)
            place = Location(file=shown_path(path), line=line, column=column)
            self._say(f"byte 0x{data[error.start]:02x} is not UTF-8", place)
            return None

    def _say(self, message: str, place: Location, hint: str = "") -> None:
        # the message names a file that the command line has named
        location = place if place.line or place.file not in message else None
        self.problems.append(Problem(message=message, hint=hint, location=location))


def hint_for(path: Path) -> str:
    """Return what to do about a recipe that cannot be read."""
    name = shown_path(path)
    if path.is_dir():
        if (path / RUN_RECIPE).is_file():
            its = f"{name}/{RUN_RECIPE} is its recipe"
            return f"it is a run: pipe resume {name} continues it, {its}"
        if (path / "config.json").is_file() or any(path.glob("*.gguf")):
            return f"it is a model: pipe init --model {name} writes a recipe"
        found = sorted(path.glob("*.yaml"))
        return f"name a file in it, such as {shown_path(found[0])}" if found else "name a file"
    if "=" in path.name:
        return "the recipe comes first: pipe run RECIPE path=value"
    for suffix in RECIPES:
        if path.with_name(path.name + suffix).is_file():
            return f"did you mean {name}{suffix}?"
    known = shipped()
    near = near_path(path, RECIPES) if path.stem not in known else ""
    ours = None if near else closest(path.stem, known)
    if ours is None:
        return near
    if known[ours].is_relative_to(Path.cwd()):
        return f"did you mean {shown_path(known[ours])}?"
    return f"pipe cp {ours} copies that recipe here"


def other_kind(path: Path) -> str:
    """Return what to do with a file that is not a recipe."""
    name = shown_path(path)
    data = f"it looks like data: pipe init --data {name} writes a recipe"
    if path.suffix in DATA:
        return data
    if path.suffix in WEIGHTS:
        return f"it looks like a model: pipe init --model {name} writes a recipe"
    return f"{data}; {OTHER_TOOLS}" if path.suffix == ".json" else OTHER_TOOLS


def shipped() -> dict[str, Path]:
    """Return name -> file of the recipes that are installed, or lie in this checkout."""
    package = Path(pipeline.__file__).parent
    for folder in (package / "shipped_recipes", package.parent / "recipes"):
        found = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
        if found:
            return found
    return {}


def by_use(stages: Sequence[str]) -> list[str]:
    """Return names of stages, most used in shipped recipes first."""
    texts = [file.read_text("utf-8") for file in shipped().values()]
    return sorted(stages, key=lambda name: -sum(f"use: {name}" in text for text in texts))
