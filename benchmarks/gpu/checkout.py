"""The product's entry points where it is not installed: a plain checkout has none."""

from __future__ import annotations

import os
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]


def declare(folder: Path) -> None:
    """Put the checkout first on the path of this process and its children, and its entry points
    into `folder`, unless they are installed."""
    paths = [str(ROOT), str(ROOT / "benchmarks")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    try:
        metadata.distribution(project["name"])
    except metadata.PackageNotFoundError:
        about = folder / f"{project['name']}-{project['version']}.dist-info"
        about.mkdir(parents=True)
        lines = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (about / "METADATA").write_text(lines, "utf-8")
        groups = project["entry-points"] | {"console_scripts": project["scripts"]}
        text = "".join(
            f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
            for group, entries in groups.items()
        )
        (about / "entry_points.txt").write_text(text, "utf-8")
        paths.append(str(folder))
    sys.path[:0] = paths
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([before] if before else [])])
