"""Exit codes, limits, trackers and targets on docs/running.md are those of the program."""

from __future__ import annotations

import re
from dataclasses import asdict

import click
import yaml

from pipeline import errors
from pipeline.chain.registry import Registry
from pipeline.commands.launch import launch
from pipeline.distributed.launch import Restarts, Timeouts
from tests.docs.blocks import ROOT, blocks

PAGE = ROOT / "docs" / "running.md"
TEXT = PAGE.read_text("utf-8")


def part(heading: str) -> str:
    """Return the text below a heading of the page."""
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(heading: str) -> list[str]:
    """Return the first cells of the tables below a heading."""
    return re.findall(r"^\| ([^|]+?) \|", part(heading), re.M)


def test_every_exit_code_of_an_error_is_in_the_table() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if isinstance(getattr(kind, "exit_code", None), int)}
    assert codes > {1, 2, 3, 4, 5}
    assert {str(code) for code in codes} <= set(rows("Exit codes"))


def test_limits_are_the_defaults() -> None:
    (shown,) = (yaml.safe_load(one.text) for one in blocks(PAGE, "yaml") if "launch:" in one.text)
    assert shown["launch"]["restarts"] == asdict(Restarts())
    assert shown["launch"]["timeouts"] == asdict(Timeouts())


def test_trackers_and_targets_are_all_there_are() -> None:
    names = Registry.installed().names("track")
    assert set(rows("Trackers")[1:]) == {f"`{name}`" for name in names}
    (target,) = (one for one in launch.params if one.name == "target")
    assert isinstance(target.type, click.Choice)
    assert set(rows("Schedulers")[1:]) == {f"`{name}`" for name in target.type.choices}
