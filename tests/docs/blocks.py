"""Code blocks of the documents, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
"""What users read, besides the README."""
DOCUMENTS = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *sorted((ROOT / "docs/dev").glob("*.md")),
]  # fmt: skip


def name(document: Path) -> str:
    """Path of a document from the top of the repository: `docs/dev/design.md`."""
    return document.relative_to(ROOT).as_posix()


FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.M | re.S)
INDENTED = re.compile(r"(?:^ {4,}\S.*\n?|^\n)+", re.M)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block."""

    language: str
    note: str
    """Text after the language."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Command:
    """A `pipe` command in a document."""

    document: Path
    words: tuple[str, ...]
    whole: bool
    """Whether it stands on a line of its own, to be typed; else it is part of a sentence."""

    def __str__(self) -> str:
        return f"{name(self.document)}: pipe {shlex.join(self.words)}"


def blocks(document: Path, language: str | None = None) -> Iterator[Block]:
    """Yield the fenced blocks, or those of one language."""
    for indent, kind, note, text in FENCE.findall(document.read_text("utf-8")):
        if language in (None, kind):
            plain = re.sub(f"^{indent}", "", text, flags=re.M)
            yield Block(language=kind, note=note.strip(), text=plain)


def commands(document: Path) -> Iterator[Command]:
    """Yield every `pipe` command: lines of code blocks, and `code` in sentences."""
    text = document.read_text("utf-8")
    fenced = [block.text for block in blocks(document) if block.language not in ("yaml", "json")]
    prose = FENCE.sub("", text)
    for code in [*fenced, *INDENTED.findall(prose)]:
        for line in code.splitlines():
            yield from _commands(document, line.strip().removeprefix("$ "), whole=True)
    for code in re.findall(r"`(pipe [^`]+)`", INDENTED.sub("", prose)):
        yield from _commands(document, " ".join(code.split()), whole=False)


def _commands(document: Path, line: str, *, whole: bool) -> Iterator[Command]:
    for part in re.split(r" && | +# | {3,}| > |\| ", line):
        part = part.removeprefix(".venv/bin/")
        if part.startswith("pipe "):
            words = tuple(shlex.split(part.removesuffix(" ...")))[1:]
            yield Command(document=document, words=words, whole=whole)
