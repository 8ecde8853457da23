"""Files and environment of the place where a command is given, which its run needs elsewhere."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import COMMAND_LINE, Location
from pipeline.recipe.dump import inline
from pipeline.recipe.load import Recipe
from pipeline.recipe.nodes import plain, texts_in
from pipeline.recipe.parse import parse

_GLOB = re.compile(r"[*?\[]")
_MACHINE = ("/dev", "/proc", "/sys")


def named_paths(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return the absolute paths that a recipe names and that are here, its own files first, without
    paths inside others; and the ones that are not here. Paths of an environment variable are not
    written down."""
    texts = texts_in(recipe.public().get("stages", {}))
    named = [_folder(Path(text)) for text in texts if text.startswith("/") and "://" not in text]
    named = [path for path in named if path != Path("/") and not str(path).startswith(_MACHINE)]
    here = [path.absolute() for path in recipe.source_files]
    here += [path for path in named if path.exists()]
    here += [folder for path in here for folder in _linked(path)]
    outermost = [path for path in dict.fromkeys(here) if not any(p in here for p in path.parents)]
    missing = dict.fromkeys(str(path) for path in named if not path.exists())
    return [str(path) for path in outermost], list(missing)


def at_home(recipe: Recipe) -> list[str]:
    """Return the paths of a recipe that begin with `~`, which is another folder in a container."""
    texts = texts_in(recipe.public().get("stages", {}))
    return list(dict.fromkeys(text for text in texts if text == "~" or text.startswith("~/")))


def with_absolute_paths(override: str) -> str:
    """Return an override whose texts that start with `./` or `../` are absolute, as it is applied
    here."""
    path, _, text = override.partition("=")
    place = Location(file=COMMAND_LINE)

    def value(folder: Path) -> Any:
        node, _ = parse(text, locate=lambda line, column: place, folder=folder)
        return node and plain(node)

    here = value(Path.cwd())
    return override if here == value(Path("/")) else f"{path}={inline(here)}"


def within(path: str, folders: Sequence[str]) -> bool:
    """Return whether a path is one of these folders, or lies in one."""
    return any(Path(path).is_relative_to(folder) for folder in folders)


def activation() -> list[str]:
    """Return the lines of a shell that give it this process's environment of Python; none for the
    system's own."""
    conda = os.environ.get("CONDA_PREFIX")
    if sys.prefix != sys.base_prefix:
        return [f". {shlex.quote(str(Path(sys.prefix, 'bin', 'activate')))}"]
    if conda and Path(conda) == Path(sys.prefix):
        program = os.environ.get("CONDA_EXE") or str(Path(conda, "bin", "conda"))
        return [
            f'eval "$({shlex.quote(program)} shell.posix hook)"',
            f"conda activate {shlex.quote(conda)}",
        ]
    return []


def _folder(path: Path) -> Path:
    """Return the folder before the first part with a wildcard; the path itself without one."""
    for number, part in enumerate(path.parts):
        if _GLOB.search(part):
            return Path(*path.parts[:number])
    return path


def _linked(path: Path) -> Iterator[Path]:
    """Yield the folders of the files that a folder's links name, as in the hub's cache."""
    if path.is_dir():
        links = (each for each in path.iterdir() if each.is_symlink() and each.exists())
        yield from {each.resolve().parent for each in links}
