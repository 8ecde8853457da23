"""Reports opened from disk in a real browser: no error, no request, and the curves are drawn."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.view.history import read_history
from pipeline.view.report.compare import comparison_page
from tests.pipeline.conftest import TinyRun

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MOST_BYTES = 300_000
LOADING = re.compile(rb"(?:src|href)\s*=\s*[\"']?\s*(?:https?:)?//", re.IGNORECASE)


@pytest.fixture(scope="module")
def pages(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the report of a run, and a comparison of it with itself."""
    both = tmp_path_factory.mktemp("pages") / "compare.html"
    history = read_history(tiny_run.folder)
    both.write_text(comparison_page([history, history]), "utf-8")
    return [tiny_run.folder / "report.html", both]


def test_nothing_can_be_loaded(pages: list[Path]) -> None:
    for page in pages:
        content = page.read_bytes()
        assert len(content) < MOST_BYTES
        assert LOADING.findall(content) == []


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A page as the browser showed it."""

    dom: str
    console: list[str]
    requests: list[str]
    """Origins of network requests that are not the browser's own."""


def seen(page: Path, folder: Path) -> Seen:
    """Open a page from disk."""
    assert BROWSER is not None
    log = folder / "requests.json"
    shown = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-background-networking", "--disable-component-update", "--no-first-run",
            "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
            f"--log-net-log={log}", "--virtual-time-budget=2000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    origins = re.findall(r'"initiator":"([^"]*)"', log.read_text("utf-8", errors="replace"))
    return Seen(
        dom=shown.stdout,
        console=[line for line in shown.stderr.splitlines() if "CONSOLE" in line],
        requests=[origin for origin in origins if origin != "not an origin"],
    )


needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium")


@needs_browser
@pytest.mark.parametrize("number", [0, 1], ids=["report", "comparison"])
def test_a_browser_shows_it(number: int, pages: list[Path], tmp_path: Path) -> None:
    found = seen(pages[number], tmp_path)
    assert (found.console, found.requests) == ([], [])
    plots = re.search(r'id="plots">(.*?)</script>', found.dom, re.DOTALL)
    assert plots is not None
    assert found.dom.count("<canvas") == len(json.loads(plots[1])) > 3


@needs_browser
def test_requests_and_errors_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>gone()</script>')
    found = seen(page, tmp_path)
    assert found.requests == ["null"]
    assert "gone is not defined" in found.console[0]
