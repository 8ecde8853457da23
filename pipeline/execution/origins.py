"""Where each value of a run's recipe comes from: `origins.json` in its folder.

The run's own `recipe.yaml` is merged, and no longer says which file or override a value is of.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.execution import rundir
from pipeline.recipe import Recipe
from pipeline.recipe.nodes import walk
from pipeline.utils.files import replace_text
from pipeline.utils.foreign import json_object

FILE = "origins.json"


def write_origins(folder: Path, recipe: Recipe) -> None:
    """Record the origin of every value of the recipe that the run is started under. A value that is
    read from the run's own recipe keeps the origin that it had."""
    before, own = origins(folder), str(folder / rundir.RECIPE)
    found = {}
    for path, node in walk(recipe.tree):
        dotted, text = ".".join(map(str, path)), str(node.at)
        kept = before.get(dotted) if text.startswith(f"{own}:") else None
        found[dotted] = kept or text
    replace_text(folder / FILE, json.dumps(found, indent=1) + "\n")


def origins(folder: Path) -> dict[str, str]:
    """Return dotted path -> `file:line:column` or the override that has set the value; empty for a
    run of an earlier version."""
    found = json_object(folder / FILE, within=folder)
    return {path: str(origin) for path, origin in found.items()}
