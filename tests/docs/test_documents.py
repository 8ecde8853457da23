"""The documents are up to date and can be read, and their links lead somewhere where the code is
read, without the site; what pyproject.toml allows is what is tested."""

from __future__ import annotations

import dataclasses
import inspect
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.contracts.plan_view import PlanView
from pipeline.contracts.stage import Context
from pipeline.distributed.process_group import DistContext
from tests.docs.blocks import DOCUMENTS, FENCE, PAGES, ROOT, name
from tests.support.tensor import GPT2_PLAN

GUIDE = (ROOT / "docs/writing-a-stage.md").read_text("utf-8")


def members(kind: type) -> set[str]:
    """Return public attributes and methods."""
    fields = {field.name for field in dataclasses.fields(kind)}
    own = {name for name, _ in inspect.getmembers(kind)} & vars(kind).keys()
    return {name for name in fields | own if not name.startswith("_")} - {"store"}


@pytest.mark.parametrize("kind", [Context, DistContext, PlanView])
def test_the_guide_names_all_that_a_stage_is_given(kind: type) -> None:
    named = set(re.findall(r"`(?:with |metrics\.)?(\w+)", GUIDE))
    assert members(kind) - named == set()


def tables(document: Path) -> Iterator[list[str]]:
    """Yield runs of lines that are table rows, outside of code."""
    text = re.sub(r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.M | re.S)
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.M):
        yield block.splitlines()


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=name)
def test_tables_are_tables(document: Path) -> None:
    for rows in tables(document):
        assert len(rows) > 2, rows
        assert re.fullmatch(r"\|([ :-]+\|)+", rows[1]), rows[:2]
        columns = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        assert len(columns) == 1, rows


def test_every_recipe_is_in_the_table() -> None:
    (table,) = (
        rows
        for rows in tables(ROOT / "docs/recipes.md")
        if any("`quickstart`" in row for row in rows)
    )
    cells = [re.search(r"`([^`]+)`", row) for row in table[2:]]
    listed = {name for cell in cells if cell for name in expanded(cell[1])}
    assert listed == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}


def expanded(names: str) -> list[str]:
    """Expand `a_{b,c}` to a_b and a_c."""
    head, _, choices = names.rstrip("}").partition("{")
    return [head + choice for choice in choices.split(",")]


PICTURES = runpy.run_path(str(ROOT / "docs/pictures.py"))["PICTURES"]


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures_are_what_the_program_draws(picture: str) -> None:
    assert (ROOT / "docs" / picture).read_text("utf-8") == PICTURES[picture]().svg()
    assert f"]({picture})" in (ROOT / "docs/parallelism.md").read_text("utf-8")


def test_the_plan_of_layers_in_the_guide_is_the_one_that_is_trained() -> None:
    text = (ROOT / "docs/parallelism.md").read_text("utf-8")
    blocks = [yaml.safe_load(one) for one in re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)]
    (plan,) = (one["tensor_parallel"]["plan"] for one in blocks if "tensor_parallel" in one)
    assert plan == GPT2_PLAN


def words(document: Path) -> int:
    """Count as `wc -w` does: tables and code too."""
    return len(document.read_text("utf-8").split())


def test_the_readme_is_short() -> None:
    assert words(ROOT / "README.md") <= 900


def test_the_pages_are_few_and_short() -> None:
    counted = {page.name: words(page) for page in PAGES}
    assert len(counted) <= 16, counted
    assert sum(counted.values()) <= 26_000, counted


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as code hosts make them."""
    text = FENCE.sub("", document.read_text("utf-8"))
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.M):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_of_a_document_lead_somewhere(document: Path) -> None:
    broken = []
    for target, part in re.findall(
        r"\]\(([^)#\s]*)(#[^)\s]*)?\)", FENCE.sub("", document.read_text())
    ):
        if "://" in target:
            continue
        file = document.parent / target if target else document
        missing = part and file.suffix == ".md" and part[1:] not in anchors(file)
        if not file.exists() or missing:
            broken.append(f"{target}{part}")
    assert broken == []


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
