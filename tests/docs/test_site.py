"""The site is built without a warning, holds together, and asks nothing of the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from pipeline.chain.registry import Registry
from pipeline.cli import COMMANDS
from tests.docs.blocks import PAGES, ROOT, blocks


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = ["build", "--strict", "-f", "docs/site/mkdocs.yml", "-d", str(folder)]
    said = subprocess.run(
        [sys.executable, "-m", "mkdocs", *command], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    lines = (said.stdout + said.stderr).splitlines()
    assert [line for line in lines if not line.startswith("INFO ")] == []
    assert said.returncode == 0
    return folder


class Page(HTMLParser):
    """Anchors of a page, its links, and what it loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := found.get(key))}
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        elif tag == "link" and found.get("rel") != "canonical":
            self.loads.append(str(found.get("href")))
        elif tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.loads.append(str(found["src"]))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}


def test_links_and_anchors_lead_somewhere(pages: dict[Path, Page]) -> None:
    broken, followed = [], 0
    for file, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            followed += 1
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (parts.fragment and parts.fragment not in anchors):
                broken.append(f"{file.name}: {link}")
    assert broken == []
    assert followed > 3000


def test_nothing_is_loaded_from_the_network(site: Path, pages: dict[Path, Page]) -> None:
    assert [load for page in pages.values() for load in page.loads if "//" in load] == []
    styles = "".join(file.read_text("utf-8") for file in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*", styles) == []


def test_pages_with_a_diagram_bring_its_program(site: Path) -> None:
    with_diagram = [file.stem for file in PAGES if any(blocks(file, "mermaid"))]
    assert "strategies" in with_diagram
    for name in with_diagram:
        assert "assets/mermaid.min.js" in (site / f"{name}.html").read_text("utf-8")
        assert 'class="mermaid"' in (site / f"{name}.html").read_text("utf-8")
    assert "assets/mermaid.min.js" not in (site / "index.html").read_text("utf-8")


def test_the_reference_has_every_stage_field_and_command(pages: dict[Path, Page]) -> None:
    anchors = {file.stem: page.anchors for file, page in pages.items() if "reference" in file.parts}
    for name in Registry.installed().names():
        assert name.replace(".", "-") in anchors[name.partition(".")[0]]
    assert {"wrap-fsdp-tensor_parallel-size", "wrap-zero-stage"} <= anchors["wrap"]
    assert {"recipe-seed", "recipe-launch-timeouts-step"} <= anchors["recipe"]
    assert set(COMMANDS) <= anchors["commands"]


def test_search_knows_a_field(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text("utf-8")
    assert "loss_chunk_size" in index
    assert index.startswith("var __index = ")  # what a page that is opened from disk can load


def test_links_to_files_of_the_repository_are_pages(site: Path) -> None:
    page = (site / "tutorial.html").read_text("utf-8")
    assert 'href="source/recipes/quickstart.yaml.html"' in page
    assert "optimizer.adamw" in (site / "source/recipes/quickstart.yaml.html").read_text("utf-8")


def test_the_readme_is_the_first_page(site: Path) -> None:
    """Every document is a page, and the first one names the tutorial."""
    title = re.search(r"^# (.*)$", (ROOT / "README.md").read_text("utf-8"), re.M)
    first = (site / "index.html").read_text("utf-8")
    assert title is not None
    assert title[1] in first
    assert 'href="tutorial.html"' in first
    assert [page.stem for page in PAGES if not (site / f"{page.stem}.html").is_file()] == []
