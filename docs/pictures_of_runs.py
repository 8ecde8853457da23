"""Make the pictures of a run, its report and a comparison: `python docs/pictures_of_runs.py`.

Carries out a recipe, by default the quickstart, twice in a terminal, and writes to docs/img:
`run.svg`, the display of the first run from start to end in some seconds; `compare.svg`, `pipe
compare` of both; and `report.png`, the top of the report (with Chromium and Pillow).
"""

from __future__ import annotations

import html
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import pyte  # noqa: E402
from browser import Browser, program  # noqa: E402
from terminal import DARK, Frame, recorded  # noqa: E402

IMAGES = ROOT / "docs" / "img"
COLUMNS, ROWS = 96, 27
CELL, LINE, MARGIN = 8.43, 18.0, 16.0
"""Width of a character and height of a line of 14 pixels, and the picture's margin."""
FRAMES = 14
"""Screens of an animation."""
FRAME_SECONDS, LAST_SECONDS = 0.7, 6.0
REPORT = (1200, 800)
COLOURS = 256
"""Of the report's picture."""


@dataclass(frozen=True)
class Text:
    """Characters of one colour in a row of the screen."""

    column: int
    text: str
    colour: str
    bold: bool


Row = tuple[Text, ...]


@dataclass(frozen=True)
class Shown:
    """A row that stands in a line from one frame up to another."""

    line: int
    row: Row
    first: int
    end: int


def row_of(screen: pyte.Screen, line: int) -> Row:
    """Return the texts of a screen's line, blanks left out."""
    cells: Sequence[Any] = [screen.buffer[line][column] for column in range(screen.columns)]
    found, column = [], 0
    for (name, bold), group in groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
        text = "".join(cell.data for cell in group)
        before = len(text) - len(text.lstrip())
        if text.strip():
            colour = DARK.get(name) or (f"#{name}" if len(name) == 6 else DARK["default"])
            found.append(Text(column + before, text.strip(), colour, bold))
        column += len(text)
    return tuple(found)


def chosen(frames: Sequence[Frame], count: int = FRAMES) -> list[Frame]:
    """Return frames that are as far apart in time as can be, the first and the last among them."""
    if len(frames) <= count:
        return list(frames)
    first, last = frames[0].seconds, frames[-1].seconds
    wanted = [first + (last - first) * number / (count - 1) for number in range(count)]
    nearest = [min(frames, key=lambda one: abs(one.seconds - at)) for at in wanted]
    return list(dict.fromkeys([*nearest[:-1], frames[-1]]))


def spans(screens: Sequence[Sequence[Row]]) -> Iterator[Shown]:
    """Yield the rows of successive screens, each as long as it stands."""
    for line in range(max(map(len, screens))):
        rows = [screen[line] if line < len(screen) else () for screen in screens]
        for row, numbers in groupby(range(len(rows)), key=lambda number: rows[number]):
            found = list(numbers)
            if row:
                yield Shown(line, row, found[0], found[-1] + 1)


def svg(screens: Sequence[Sequence[Row]], *, columns: int = COLUMNS, title: str = "") -> str:
    """Return a picture of a screen, or of several after each other, again and again. Where nothing
    moves, or nothing shall, it is the last."""
    lines = max(map(len, screens))
    width, height = columns * CELL + 2 * MARGIN, lines * LINE + 2 * MARGIN
    shown = list(spans(screens))
    parts = [_row(one, len(screens)) for one in shown]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" role="img"><title>{html.escape(title)}</title>',
            f"<style>{_style(shown, len(screens))}</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{DARK["paper"]}" stroke="#30363d"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _row(shown: Shown, count: int) -> str:
    y = MARGIN + shown.line * LINE + 13
    texts = "".join(
        f'<text x="{MARGIN + one.column * CELL:.1f}" y="{y:.0f}" fill="{one.colour}"'
        f'{_weight(one)} textLength="{len(one.text) * CELL:.1f}">'
        f"{html.escape(one.text)}</text>"
        for one in shown.row
    )
    return (
        texts
        if (shown.first, shown.end) == (0, count)
        else f'<g class="{_name(shown)}">{texts}</g>'
    )


def _weight(text: Text) -> str:
    return ' font-weight="bold"' if text.bold else ""


def _name(shown: Shown) -> str:
    return f"f{shown.first}-{shown.end}"


def _style(shown: Sequence[Shown], count: int) -> str:
    """Return the style sheet: each row is visible for its share of the time."""
    whole = (count - 1) * FRAME_SECONDS + LAST_SECONDS
    style = [
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "white-space:pre}"
    ]
    moves = []
    for name, one in {_name(one): one for one in shown}.items():
        if (one.first, one.end) == (0, count):
            continue
        if one.end < count:
            style.append(f".{name}{{visibility:hidden}}")
        start = 100 * one.first * FRAME_SECONDS / whole
        end = 100.0 if one.end == count else 100 * one.end * FRAME_SECONDS / whole
        visible = f"{start:.2f}%{{visibility:visible}}"
        before = "0%{visibility:hidden}" if one.first else ""
        after = f"{end:.2f}%{{visibility:hidden}}" if one.end < count else ""
        moves.append(
            f"@keyframes {name}{{{before}{visible}{after}}}"
            f".{name}{{animation:{name} {whole:.1f}s step-end infinite}}"
        )
    if moves:
        style.append(f"@media (prefers-reduced-motion: no-preference){{{''.join(moves)}}}")
    return "".join(style)


def screen_of(text: str, columns: int = COLUMNS) -> list[Row]:
    """Return the rows of a plain text, such as the output of a command."""
    rows: list[Row] = []
    for line in text.splitlines():
        found = (Text(0, line[:columns], DARK["default"], False),) if line.strip() else ()
        rows.append(found)
    return rows


def prompt(command: str) -> Row:
    """Return the line in which a command was typed."""
    return (Text(0, "$", DARK["green"], True), Text(2, command, DARK["default"], True))


def rows_of(frame: Frame, command: str) -> list[Row]:
    """Return a frame's rows under the command that was typed, without empty ones at the end."""
    rows = [prompt(command), *(row_of(frame.screen, line) for line in range(frame.screen.lines))]
    while len(rows) > 1 and not rows[-1]:
        rows.pop()
    return rows


def fewer_colours(png: bytes) -> bytes:
    """Return a PNG with a palette, which is a fraction of the size."""
    from PIL import Image

    out = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
            out, "PNG", optimize=True
        )
    return out.getvalue()


def main(recipe: str = "recipes/quickstart.yaml", *overrides: str) -> None:
    """Make all pictures of runs of a recipe under these overrides."""
    folder = Path(tempfile.mkdtemp(prefix="pipe-"))
    (folder / "recipes").symlink_to(ROOT / "recipes")
    if Path(recipe).is_absolute():
        recipe = Path(shutil.copy(recipe, folder)).name
    pipe = [sys.executable, "-P", "-m", "pipetrain"]
    command = ["run", recipe, *overrides, "--run-dir"]
    frames = recorded(
        [*pipe, *command, "runs/first"],
        COLUMNS,
        ROWS,
        folder=folder,
        hidden=(f"{folder}/", f"{ROOT}/"),
    )
    screens = [rows_of(frame, f"pipe run {recipe}") for frame in chosen(frames)]
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "run.svg").write_text(svg(screens, title="pipe run, from start to end"), "utf-8")
    subprocess.run(
        [*pipe, *command, "runs/second", "optimizer.lr=0.001", "wrap.use=wrap.fsdp", "-q"],
        cwd=folder, check=True,
    )  # fmt: skip
    said = subprocess.run(
        [*pipe, "compare", "runs/first", "runs/second"],
        cwd=folder, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    rows = [prompt("pipe compare runs/first runs/second"), *screen_of(said)]
    (IMAGES / "compare.svg").write_text(svg([rows], title="pipe compare"), "utf-8")
    chromium = program()
    if chromium is None:
        print("no Chromium here: docs/img/report.png is as it was", file=sys.stderr)
    else:
        with Browser(chromium) as browser:
            width, height = REPORT
            address = (folder / "runs/first/report.html").as_uri()
            png = browser.open(address, width=width).picture(height=height)
        (IMAGES / "report.png").write_bytes(fewer_colours(png))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
