"""Reports opened from disk in a real browser: no error, no request, and the curves are drawn."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.view.compare import comparison_page, write_folder_report
from pipeline.view.run import History
from pipeline.view.run_report import run_page
from tests.pipeline.conftest import TinyRun
from tests.pipeline.view.folders import EVENTS, drawn, evaluation, made, step

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MOST_BYTES = 300_000
LOADING = re.compile(rb"(?:src|href)\s*=\s*[\"']?\s*(?:https?:)?//", re.IGNORECASE)


@pytest.fixture(scope="module")
def pages(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the report of a run, a comparison of it with itself, and the page of its folder."""
    folder = tmp_path_factory.mktemp("pages")
    both = folder / "compare.html"
    history = History(tiny_run.folder)
    both.write_text(comparison_page([history, history]), "utf-8")
    runs = write_folder_report(tiny_run.folder.parent, folder / "runs.html")
    return [tiny_run.folder / "report.html", both, runs]


def test_nothing_can_be_loaded(pages: list[Path]) -> None:
    for page in pages:
        content = page.read_bytes()
        assert len(content) < MOST_BYTES
        assert LOADING.findall(content) == []


def seen(page: Path, folder: Path) -> tuple[str, list[str], list[str]]:
    """Open a page from disk; return it as the browser showed it, its messages on the console, and
    origins of network requests that are not the browser's own."""
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
    console = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    return shown.stdout, console, [one for one in origins if one != "not an origin"]


needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium")


@needs_browser
@pytest.mark.parametrize("number", [0, 1, 2], ids=["report", "comparison", "runs"])
def test_a_browser_shows_it(number: int, pages: list[Path], tmp_path: Path) -> None:
    dom, *noticed = seen(pages[number], tmp_path)
    assert noticed == [[], []]
    assert dom.count("<canvas") == len(drawn(dom)) > 2


@needs_browser
def test_requests_and_errors_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>gone()</script>')
    _, console, requests = seen(page, tmp_path)
    assert requests == ["null"]
    assert "gone is not defined" in console[0]


WIDE = """
(() => {
  const width = document.documentElement.clientWidth;
  const over = [...document.querySelectorAll("body *")]
    .filter((one) => one.getBoundingClientRect().right > width + 0.5)
    .filter((one) => !one.closest(".scroll, pre"))
    .map((one) => one.tagName + "." + one.className);
  return [document.documentElement.scrollWidth - width, over];
})()
"""
"""Pixels by which a page is wider than the window, and what reaches beyond it."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a browser whose windows have any width."""
    docs = str(Path(__file__).parents[3] / "docs")
    sys.path.insert(0, docs)
    try:
        module = importlib.import_module("browser")
    finally:
        sys.path.remove(docs)
    with module.Browser(BROWSER) as browser:
        yield browser


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the pages of runs whose names, texts and numbers are long."""
    folder = tmp_path_factory.mktemp("crowded")
    word, long = "x" * 300, "a_name_without_a_blank_" * 6
    recipe = {"name": "a", "stages": {"model": {"use": "model.hf", "path": f"/{word}/{word}"}}}
    said = [{"number": 0, "prompt": word, "text": word}, {"number": 1, "prompt": "p", "text": ""}]
    metrics = [
        evaluation(0, 12345.6789, 0, 12345.6789),
        {"step": 0, "generated": said},
        *[step(number, tokens=10**12, **{long: number / 3}) for number in range(1, 30)],
        {"step": 29, "time": 1029.0, "generated": said},
        evaluation(29, 2.0, 29, 2.0),
    ]
    failed = [*EVENTS[:-1], {"event": "run failed", "time": 1070.0, "problem": word}]
    runs = [made(folder / f"{long}{n}", failed, metrics, recipe) for n in range(3)]
    histories = [History(run) for run in runs]
    run, both = folder / "run.html", folder / "both.html"
    run.write_text(run_page(histories[0]), "utf-8")
    both.write_text(comparison_page(histories), "utf-8")
    return [run, both, write_folder_report(folder)]


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_is_wider_than_the_window(
    width: int, dark: bool, pages: list[Path], crowded: list[Path], browser: Any
) -> None:
    for file in (*pages, *crowded):
        page = browser.open(file.as_uri(), width=width, dark=dark)
        assert page.value("innerWidth") == width
        assert page.value(WIDE) == [0, []], file.name
        ground = page.value("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")


@needs_browser
def test_too_wide_would_be_seen(tmp_path: Path, browser: Any) -> None:
    file = tmp_path / "page.html"
    file.write_text('<body style="margin: 0"><p style="width: 416px">text')
    assert browser.open(file.as_uri(), width=400).value(WIDE) == [16, ["P."]]


@needs_browser
def test_values_are_told_where_the_pointer_is(crowded: list[Path], browser: Any) -> None:
    page = browser.open(crowded[0].as_uri(), width=1200)
    told = "[...document.querySelectorAll('.plot output')].map((one) => one.textContent).join('')"
    assert page.value(told) == ""
    page.value(
        "(() => {const over = document.querySelector('.plot .u-over');"
        "const box = over.getBoundingClientRect();"
        "const at = {clientX: box.right - 1, clientY: box.top + 20};"
        "over.dispatchEvent(new MouseEvent('mousemove', at));})()"
    )
    time.sleep(0.5)
    first = "[...document.querySelector('.plot').querySelectorAll('output')]"
    assert page.value(f"{first}.map((one) => one.textContent)") == ["step 29", "1.1", "2"]
    assert page.value(told).count("step 29: ") == page.value(
        "[...document.querySelectorAll('.plot')].filter((one) => !one.querySelector('.key')).length"
    )
