"""Words that the project does not use where a user reads, and the texts that users read."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple

import click

from pipeline.chain.registry import Registry
from pipeline.cli import main
from pipeline.recipe.fields import field_rows
from tests.docs.blocks import FENCE, INDENTED, ROOT

INSTEAD = {
    r"behind": "after, past, downstream of",
    r"(?<!--)besides?": "next to, in addition to, outside of",
    r"anew": "again",
    r"alone": "only",
    r"(?:tell|tells|told|telling) of": "report",
    r"(?:that|those) of": "repeat the noun, or use 's",
    r"of (?:its|their|his|your) own": "its own, separate",
    r"(?:come|comes|came|become|becomes|became) of": "result from, happen to",
    r"bears?": "support, allow",
    r"(?:lend|lends|lent)": "provide",
    r"(?:is|are|be) held to": "must match, is compared with",
    r"of which": "split the sentence",
    r"(?:is|are) to be": "must be, is",
    r"(?:has|have) to be": "must be",
    r"(?:go|goes|going|went) on": "continue",
    r"in place of": "instead of",
    r"gives": "returns, prints, writes, provides",
    r"(?<!there )(?:is|are) (?-i:no)(?! (?:longer|more|less|better|faster|slower))": "is not a",
    r"nobody": "no one, or name who",
    r"perhaps": "maybe, or say what it depends on",
    r"thereby|therein|thereof|whereof|wherein": "so, in it, of it",
}  # fmt: skip
"""Pattern of a word or phrase -> what to write instead."""

PATTERN = re.compile("|".join(rf"\b(?:{word})(?!\w)" for word in INSTEAD), re.I)


class Text(NamedTuple):
    """A piece of text that a user may read."""

    where: str
    text: str


def found(text: str) -> list[str]:
    """Words of `text` that are not used."""
    return [match.group().strip().lower() for match in PATTERN.finditer(text)]


def messages() -> Iterator[Text]:
    """Strings of more than one word in the packages, without docstrings: messages, help, labels."""
    for path in sorted([*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "stages").rglob("*.py")]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docs
                and " " in node.value.strip()
            ):
                yield Text(f"{path.relative_to(ROOT)}:{node.lineno}", node.value)


def docstrings() -> Iterator[Text]:
    """Docstrings in the packages, without the names of code."""
    for path in sorted([*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "stages").rglob("*.py")]):
        where = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Expr(ast.Constant(str(text))):
                    yield Text(f"{where}:{node.lineno}", re.sub(r"`[^`]*`", "``", text))


def help_pages() -> Iterator[Text]:
    """The help of every command, and the page of every installed stage of ours."""
    top = main.make_context("pipe", ["ls"], resilient_parsing=True)  # click keeps the help option
    for name, command in _commands(main, "pipe"):
        context = click.Context(command, info_name=name, parent=top)
        yield Text(f"{name} --help", command.get_help(context))
    registry = Registry.installed()
    for entry in registry.entries():
        if entry.distribution == "pipetrain":
            kind = registry.load(entry.name)
            yield Text(f"pipe stages {entry.name}", inspect.getdoc(kind) or "")
            for row in field_rows(kind):
                yield Text(f"pipe stages {entry.name}: {row.name}", row.doc)


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            assert below is not None
            yield from _commands(below, f"{name} {each}")


def pages() -> Iterator[Text]:
    """Prose of the README and the users' pages, without code."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        prose = re.sub(
            r"`[^`\n]*`", "``", INDENTED.sub("\n", FENCE.sub("", path.read_text("utf-8")))
        )
        for number, line in enumerate(prose.splitlines(), 1):
            yield Text(f"{path.relative_to(ROOT)}:{number}", line)


def files() -> Iterator[Text]:
    """Lines of what is shipped for people to read or copy: recipes' comments, templates of packages
    and of reports, findings of `pipe doctor`."""
    globs = ("recipes/*.yaml", "pipeline/scaffold/templates/**/*.j2", "pipeline/view/**/*.j2",
             "pipeline/view/**/page.js", "pipeline/doctor/findings.toml")  # fmt: skip
    for path in sorted(path for pattern in globs for path in ROOT.glob(pattern)):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            yield Text(f"{path.relative_to(ROOT)}:{number}", line)
