"""Figures in the guide to strategies are those that the planner gives today."""

from __future__ import annotations

import re

import pytest

from pipeline.chain.plan import plan_file
from pipeline.planning.hardware import HardwareOptions, Margins
from pipeline.planning.memory_plan import estimate_plan
from tests.docs.blocks import ROOT

TEXT = (ROOT / "docs" / "strategies.md").read_text("utf-8")
ROW = re.compile(
    r"^\| (?P<what>[^|]+) \| +`?(?P<changes>[^|`]*)`? *\| (?P<gib>[\d.]+) \| (?P<s>[\d.]+) \|$",
    re.M,
)
TABLES = re.findall(r"<!-- planned: (\S+) -->\n((?:\|.*\n)+)", TEXT)
PLANNED = [
    pytest.param(recipe, row["changes"].split(), float(row["gib"]), float(row["s"]), id=row["what"])
    for recipe, table in TABLES
    for row in ROW.finditer(table)
]


@pytest.mark.parametrize(("recipe", "overrides", "gib", "seconds"), PLANNED)
def test_a_row_is_what_the_planner_says(
    recipe: str, overrides: list[str], gib: float, seconds: float
) -> None:
    plan = plan_file(ROOT / recipe, overrides, forecast=True)
    found = estimate_plan(plan, HardwareOptions(gpu="H100"), Margins())
    assert found.needed / 2**30 == pytest.approx(gib, abs=0.051)
    assert found.time.expected == pytest.approx(seconds, abs=0.051)


def test_all_rows_are_planned() -> None:
    rows = [line for _, table in TABLES for line in table.splitlines()[2:]]
    assert len(PLANNED) == len(rows) == 15


def test_recipes_are_listed_with_their_own_figures() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (\d+) x (\w+) \| (\d+) \|", TEXT, re.M)
    stated = []
    for path in (ROOT / "recipes").glob("*.yaml"):
        stated += [
            (path.stem, *figures)
            for figures in re.findall(r"# Planned for (\d+) x (\w+): (\d+) GiB", path.read_text())
        ]
    assert sorted(listed) == sorted(stated)
