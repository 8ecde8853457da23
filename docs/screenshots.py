"""Take the screenshots of what people see: `python docs/screenshots.py [FOLDER] [WORD ...]`.

Builds the documentation and photographs it with headless Chromium, in light and dark and as wide as
a phone. Pictures go to build/screenshots and are not committed. With words, only those pictures
whose name has one of them.

More pictures are further functions in SUBJECTS: name of a group -> its pictures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = (1280, 900), (500, 900)
"""Width and height. Chromium's window is never narrower than 500."""
PAGES = ("index", "concepts", "choosing", "troubleshooting", "reference/wrap")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture: its name, the page, and how it is looked at."""

    name: str
    address: str
    size: tuple[int, int] = DESKTOP
    dark: bool = False


def documentation() -> Iterator[Picture]:
    """Pages of the documentation, which is built for it."""
    site = ROOT / "build" / "docs"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", "docs/site/mkdocs.yml"],
        cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    for page in PAGES:
        address, name = (site / f"{page}.html").as_uri(), f"docs-{page.replace('/', '-')}"
        yield Picture(name=f"{name}-light", address=address)
        yield Picture(name=f"{name}-dark", address=address, dark=True)
        yield Picture(name=f"{name}-phone", address=address, size=PHONE)
    yield Picture(name="docs-search", address=f"{(site / 'index.html').as_uri()}?q=shard_grad_op")


SUBJECTS: dict[str, Callable[[], Iterator[Picture]]] = {"docs": documentation}
"""Groups of pictures. The terminal's and the report's belong here too."""


def browser() -> str:
    """Path of Chromium. Exits where there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        sys.exit(f"no browser here: install one of {', '.join(BROWSERS)}")
    return found


def take(picture: Picture, folder: Path, program: str) -> Path:
    """Take one picture."""
    file = folder / f"{picture.name}.png"
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--allow-file-access-from-files", "--virtual-time-budget=6000",
            f"--user-data-dir={profile}", f"--screenshot={file}",
            f"--window-size={picture.size[0]},{picture.size[1]}",
        ]  # fmt: skip
        if picture.dark:
            options.append("--blink-settings=preferredColorScheme=0")
        subprocess.run([program, *options, picture.address], check=True, capture_output=True)
    return file


def main(folder: str = "build/screenshots", *words: str) -> None:
    """Take all pictures, or those whose names have one of the words."""
    target, program = (ROOT / folder).resolve(), browser()
    target.mkdir(parents=True, exist_ok=True)
    for pictures in SUBJECTS.values():
        for picture in pictures():
            if not words or any(word in picture.name for word in words):
                print(take(picture, target, program))


if __name__ == "__main__":
    main(*sys.argv[1:])
