"""Variables of the shell in paths of a recipe, which does not expand them."""

from __future__ import annotations

import re


def instead_of_variable(path: str) -> str:
    """Return a hint with what to write for a path with a variable, such as `$DATA/x.jsonl`; empty
    for other paths."""
    found = re.search(r"\$(\w+)", path)
    if found is None:
        return ""
    written = path.replace(found[0], f"${{oc.env:{found[1]}}}")
    return f"write {written}, and `env: [{found[1]}]` at the top of the recipe"
