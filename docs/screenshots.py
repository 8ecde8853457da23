"""Take the screenshots of what people see: `python docs/screenshots.py [FOLDER] [WORD ...]`.

Builds the documentation, runs a small training in terminals, and photographs both, its report and a
comparison with headless Chromium, in light and dark and as wide as a phone. Pictures go to
build/screenshots and are not committed. With words, only those of these groups (`docs`, `runs`), or
whose names have one of them.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from browser import PROGRAMS, Browser, program, save
from terminal import ROWS, page, screens

ROOT = Path(__file__).parents[1]
DESKTOP, WIDE, PHONE = (1280, 900), (1200, 900), (400, 900)
"""Width and height of the window. Pictures show the whole page."""
AT = ("step 35 of 60",)
"""Texts at which a run's screen is photographed, besides its end."""
SMALL = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
PAGES = ("index", "concepts", "strategies", "troubleshooting", "reference/wrap")


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
    for name in PAGES:
        address, shown = (site / f"{name}.html").as_uri(), f"docs-{name.replace('/', '-')}"
        yield Picture(name=f"{shown}-light", address=address)
        yield Picture(name=f"{shown}-dark", address=address, dark=True)
        yield Picture(name=f"{shown}-phone", address=address, size=PHONE)
    yield Picture(name="docs-search", address=f"{(site / 'index.html').as_uri()}?q=shard_grad_op")


def runs() -> Iterator[Picture]:
    """A small run in terminals of 80 and 120 columns, its report, and the comparison of both."""
    folder = Path(tempfile.mkdtemp(prefix="pipe-"))
    recipe = write_recipe(folder)
    command = [sys.executable, "-P", "-m", "pipetrain"]
    for columns in (80, 120):
        own = [f"optimizer.lr={columns / 10000}", "--run-dir", f"run-{columns}"]
        shown = screens([*command, "run", str(recipe), *own], columns, at=AT, folder=folder)
        for number, screen in enumerate(shown.values()):
            for dark in (False, True):
                name = f"terminal-{columns}-{number}-{'dark' if dark else 'light'}"
                file = folder / f"{name}.html"
                file.write_text(page(screen, dark=dark), "utf-8")
                size = (columns * 9 + 32, ROWS * 19 + 32)
                yield Picture(name=name, address=file.as_uri(), size=size)
    compared = ["compare", "run-80", "run-120", "--out", "compare.html"]
    subprocess.run([*command, *compared], cwd=folder, check=True, capture_output=True)
    subprocess.run([*command, "report", "."], cwd=folder, check=True, capture_output=True)
    pages = {"report": "run-120/report.html", "compare": "compare.html", "runs": "report.html"}
    for name, file in pages.items():
        address = (folder / file).as_uri()
        for dark in (False, True):
            for size in (WIDE, PHONE):
                kind = f"{size[0]}-{'dark' if dark else 'light'}"
                yield Picture(name=f"{name}-{kind}", address=address, size=size, dark=dark)
    shutil.rmtree(folder)


def write_recipe(folder: Path) -> Path:
    """Write a recipe that trains a small model for a minute; return it."""
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text("utf-8"))
    stages = recipe["stages"]
    tokenizer = next((ROOT / "recipes" / "models").glob("smollm2-135m-instruct/*.gguf"), None)
    if tokenizer is None:
        sys.exit("run recipes/fetch_smollm.py first: its tokenizer is used")
    stages["model"] = {"use": "model.hf", "config": SMALL, "tokenizer": str(tokenizer)}
    stages["data"]["files"] = str(ROOT / "recipes" / "data" / "persuasion.txt")
    stages["train"] |= {
        "steps": 60, "eval_every": 20, "log_every": 1,
        "generate": {"prompts": ["She looked"], "every": 20, "max_tokens": 12},
    }  # fmt: skip
    stages["checkpoint"] |= {"every": 20}
    recipe["name"] = "persuasion"
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    return file


SUBJECTS: dict[str, Callable[[], Iterator[Picture]]] = {"docs": documentation, "runs": runs}
"""Groups of pictures."""


def main(folder: str = "build/screenshots", *words: str) -> None:
    """Take the pictures of all groups, or of the groups and with the names that are given."""
    target, chromium = (ROOT / folder).resolve(), program()
    if chromium is None:
        sys.exit(f"no browser here: install one of {', '.join(PROGRAMS)}")
    target.mkdir(parents=True, exist_ok=True)
    chosen = [SUBJECTS[word] for word in words if word in SUBJECTS] or SUBJECTS.values()
    names = [word for word in words if word not in SUBJECTS]
    with Browser(chromium) as browser:
        for picture in itertools.chain.from_iterable(pictures() for pictures in chosen):
            if not names or any(word in picture.name for word in names):
                width, height = picture.size
                opened = browser.open(
                    picture.address, width=width, height=height, dark=picture.dark
                )
                print(save(opened, target / f"{picture.name}.png"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
