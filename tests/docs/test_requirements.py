"""What pyproject.toml allows is what is tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ON_GPUS = {"torch": "2.11", "transformers": "5.17"}
"""Older versions than in constraints.txt, with which the tests on GPUs run."""


def plain(name: str) -> str:
    return name.lower().replace("_", "-")


def test_no_version_is_allowed_that_is_older_than_what_is_tested() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    tested = {plain(name): version for name, version in pairs} | ON_GPUS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    bounds = 0
    for requirement in (each for group in groups for each in group):
        found = re.match(r"([\w.-]+)>=([\d.]+)", requirement)
        if found is None or plain(found[1]) not in tested:
            continue
        bound, version = found[2].split("."), tested[plain(found[1])].split(".")
        assert [*map(int, bound[:2])] == [*map(int, version[: min(2, len(bound))])], requirement
        bounds += 1
    assert bounds > 40
