"""The pictures of runs: what is drawn of recorded screens."""

from __future__ import annotations

import importlib
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pyte
import pytest

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 150_000


@pytest.fixture(scope="module")
def pictures() -> Any:
    """Return the module docs/pictures_of_runs.py."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("pictures_of_runs")
    finally:
        sys.path.remove(str(DOCS))


def screen(*lines: str) -> pyte.Screen:
    """Return a terminal on which these lines were printed."""
    made = pyte.Screen(40, 6)
    pyte.Stream(made).feed("\r\n".join(lines))
    return made


def frames(pictures: Any, *screens: pyte.Screen) -> list[Any]:
    frame = pictures.Frame
    return [frame(float(second), shown) for second, shown in enumerate(screens)]


def texts(svg: str) -> list[tuple[float, str]]:
    """Return height and text of what a picture has."""
    found = ET.fromstring(svg).iter(f"{SVG}text")
    return [(float(one.attrib["y"]), one.text or "") for one in found]


def test_a_row_is_its_texts_by_colour(pictures: Any) -> None:
    made = screen("  plain \x1b[1;32mgreen\x1b[0m <&>")
    row = pictures.row_of(made, 0)
    assert [(one.column, one.text, one.bold) for one in row] == [
        (2, "plain", False), (8, "green", True), (14, "<&>", False)
    ]  # fmt: skip
    assert row[1].colour == pictures.DARK["green"]


def test_a_row_that_stays_is_drawn_once(pictures: Any) -> None:
    screens = [screen("same", "1"), screen("same", "2"), screen("same", "2", "end")]
    recorded = frames(pictures, *screens)
    svg = pictures.svg([pictures.rows_of(one, "pipe run") for one in recorded], title="a & b")
    rows = texts(svg)
    assert [text for _, text in rows] == ["$", "pipe run", "same", "1", "2", "end"]
    heights = {text: y for y, text in rows}
    assert heights["1"] == heights["2"] == heights["same"] + pictures.LINE
    classes = {one.attrib["class"]: one for one in ET.fromstring(svg).iter(f"{SVG}g")}
    assert set(classes) == {"f0-1", "f1-3", "f2-3"}
    style = ET.fromstring(svg).find(f"{SVG}style")
    assert style is not None
    still = (style.text or "").split("@media")[0]
    assert re.findall(r"\.(f\d-\d)\{visibility:hidden\}", still) == ["f0-1"]  # the last is seen
    whole = 2 * pictures.FRAME_SECONDS + pictures.LAST_SECONDS
    second = 100 * pictures.FRAME_SECONDS / whole
    times = f"0.00%{{visibility:visible}}{second:.2f}%{{visibility:hidden}}"
    assert f"@keyframes f0-1{{{times}}}" in svg


def test_a_still_picture_does_not_move(pictures: Any) -> None:
    svg = pictures.svg([pictures.screen_of("one\n\n  two <b>\n")])
    assert [text for _, text in texts(svg)] == ["one", "  two <b>"]
    assert "animation" not in svg
    assert "<g" not in svg


def test_frames_are_chosen_by_time(pictures: Any) -> None:
    made = [pictures.Frame(at, screen(str(at))) for at in (0.0, 0.1, 0.2, 5.0, 9.0, 10.0)]
    kept = [one.seconds for one in pictures.chosen(made, 3)]
    assert kept == [0.0, 5.0, 10.0]
    assert pictures.chosen(made, 6) == made


def test_a_recorded_command_is_its_screens(pictures: Any, tmp_path: Path) -> None:
    program = f"import time; print('{tmp_path}/a', flush=True); time.sleep(0.6); print('b')"
    command = [sys.executable, "-c", program]
    found = pictures.recorded(command, 40, 6, folder=tmp_path, hidden=[f"{tmp_path}/"])
    assert [one.screen.display[0].strip() for one in found] == ["a"] * len(found)
    assert [one.screen.display[1].strip() for one in (found[0], found[-1])] == ["", "b"]


def test_a_palette_keeps_the_picture(pictures: Any) -> None:
    image = pytest.importorskip("PIL.Image")
    import io

    whole = io.BytesIO()
    image.new("RGB", (60, 40), "#0b66c3").save(whole, "PNG")
    with image.open(io.BytesIO(pictures.fewer_colours(whole.getvalue()))) as small:
        assert (small.size, small.mode) == ((60, 40), "P")
        assert small.convert("RGB").getpixel((30, 20)) == (0x0B, 0x66, 0xC3)


@pytest.mark.parametrize("name", ["run.svg", "compare.svg", "report.png"])
def test_the_pictures_are_there_and_small(name: str) -> None:
    content = (DOCS / "img" / name).read_bytes()
    assert 1000 < len(content) < MOST_BYTES
    assert re.search(rb"https?://(?!www\.w3\.org/2000/svg)|<script|/tmp/|/home/", content) is None
    assert str(DOCS.parent).encode() not in content
