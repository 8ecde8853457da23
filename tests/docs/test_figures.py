"""Numbers, rows and lists on the users' pages are what the program says today."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import click
import pytest
import yaml

from pipeline import errors
from pipeline.chain.plan import plan_file
from pipeline.chain.registry import Registry
from pipeline.commands.launch import launch
from pipeline.distributed.settings import Restarts, Timeouts
from pipeline.planning.hardware import HardwareOptions, Margins
from pipeline.planning.memory_plan import estimate_plan
from stages.data.forms import KEYS, first_form, read
from stages.data.messages import Conversation, Names
from stages.data.rows import Row
from tests.docs.blocks import ROOT, blocks, commands
from tests.support.command import pipe

DATA, PLANNING, RUNNING, STRATEGIES = (
    ROOT / f"docs/{name}.md" for name in ("data", "planning", "running", "strategies")
)

# docs/data.md

EXAMPLES = dict(re.findall(r"^\| `([a-z_/]+)` \| `(\{.*\})` \|$", DATA.read_text("utf-8"), re.M))


def test_every_form_has_an_example() -> None:
    assert EXAMPLES.keys() == KEYS.keys()


@pytest.mark.parametrize("form", KEYS)
def test_an_example_is_a_row_of_its_form(form: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(EXAMPLES[form] + "\n")
    assert first_form(file, Names()) == form
    row = Row(file=file, number=1, value=json.loads(EXAMPLES[form]), form=form)
    found = read(row, template=True, names=Names(), vocab_size=100)
    assert isinstance(found, Conversation) == (form not in ("text", "input_ids"))


# docs/planning.md


def test_the_plan_that_is_shown_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without runs that have measured memory
    shown = next(blocks(PLANNING, "text")).text.splitlines()
    words = next(
        one.words for one in commands(PLANNING) if "--interconnect" in shlex.join(one.words)
    )
    result = pipe(words[0], ROOT / words[1], *words[2:])
    assert result.exit_code == 0, result.output
    assert [line for line in shown if line not in {*result.output.splitlines(), "..."}] == []
    assert len(shown) > 10


# docs/running.md


def rows(heading: str) -> list[str]:
    """Return the first cells of the tables below a heading of the page."""
    part = RUNNING.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([^|]+?) \|", part, re.M)


def test_every_exit_code_of_an_error_is_in_the_table() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if isinstance(getattr(kind, "exit_code", None), int)}
    assert codes > {1, 2, 3, 4, 5}
    assert {str(code) for code in codes} <= set(rows("Exit codes"))


def test_limits_are_the_defaults() -> None:
    found = (yaml.safe_load(one.text) for one in blocks(RUNNING, "yaml") if "timeouts:" in one.text)
    (shown,) = found
    assert shown["launch"]["restarts"] == asdict(Restarts())
    assert shown["launch"]["timeouts"] == asdict(Timeouts())


def test_trackers_and_targets_are_all_there_are() -> None:
    names = Registry.installed().names("track")
    assert set(rows("Trackers")[1:]) == {f"`{name}`" for name in names}
    (target,) = (one for one in launch.params if one.name == "target")
    assert isinstance(target.type, click.Choice)
    assert set(rows("Schedulers")[1:]) == {f"`{name}`" for name in target.type.choices}


# docs/strategies.md

TEXT = STRATEGIES.read_text("utf-8")
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
    assert len(PLANNED) == sum(len(table.splitlines()[2:]) for _, table in TABLES) == 15


def test_recipes_are_listed_with_their_own_figures() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (\d+) x (\w+) \| (\d+) \|", TEXT, re.M)
    stated = [
        (path.stem, *figures)
        for path in (ROOT / "recipes").glob("*.yaml")
        for figures in re.findall(r"# Planned for (\d+) x (\w+): (\d+) GiB", path.read_text())
    ]
    assert sorted(listed) == sorted(stated)
