"""Third-party packages for tests, written as installed ones or taken from a document."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

FENCE = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def install(
    folder: Path,
    distribution: str,
    module: str,
    source: str,
    points: Mapping[str, str],
    planners: Mapping[str, str] | None = None,
) -> None:
    """Put a module and its metadata into `folder`, which belongs on the path, as an installer
    would. `points` map stage names to classes, `planners` map them to the stages' planners."""
    (folder / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n", encoding="utf-8"
    )
    lines = []
    for group, found in (("pipe.stages", points), ("pipe.planners", planners or {})):
        lines += [f"[{group}]", *(f"{name} = {module}:{kind}" for name, kind in found.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def files_in(document: Path) -> dict[str, str]:
    """Return the code blocks of a Markdown file that are marked as files, by name."""
    found = FENCE.findall(document.read_text("utf-8"))
    return {name: text for _, name, text in found if name}


def sessions_in(document: Path) -> dict[str, str]:
    """Return the console blocks of a Markdown file: command -> output."""
    found = FENCE.findall(document.read_text("utf-8"))
    blocks = [
        text.removeprefix("$ ").partition("\n") for kind, _, text in found if kind == "console"
    ]
    return {command: output for command, _, output in blocks}
