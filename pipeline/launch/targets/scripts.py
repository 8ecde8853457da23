"""The scripts of the targets: each is a template of its name in `templates/`."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.distributed.environment import TOKEN
from pipeline.launch.targets.job import Job

WIDTH = 100
NEW_TOKEN = "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"
"""A secret, for a POSIX shell."""


def render(target: str, job: Job, **more: str) -> str:
    """Return the script of a target."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(comment=_comment, quote=shlex.quote, yaml=_value, in_place=_in_place)
    environment.globals.update(label=label, entry=_entry, TOKEN=TOKEN, NEW_TOKEN=NEW_TOKEN)
    return environment.get_template(f"{target}.j2").render(job=job, **more)


def label(name: str, longest: int) -> str:
    """The name with what DNS allows in a label: small letters, digits and dashes, a letter first.
    dstack wants two of them at least."""
    found = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    found = found if len(found) > 1 and found[0].isalpha() else f"run-{found}"
    return found[:longest].rstrip("-")


def _comment(text: str) -> str:
    """Paragraphs as comment lines of a shell script or YAML file."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        lines += textwrap.wrap(paragraph, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)


def _in_place(paths: Iterable[str]) -> list[str]:
    """Mounts of paths at the same place."""
    return [f"{path}:{path}" for path in paths]


def _entry(key: str, value: Any) -> str:
    """An entry of a YAML mapping."""
    return yaml.dump({key: value}, Dumper=_Dumper, width=1 << 20).removesuffix("\n")


def _value(value: Any) -> str:
    """A text or number on one line of a YAML file."""
    style = '"' if "\n" in str(value) else None
    text: str = yaml.safe_dump(value, default_style=style, width=1 << 20)
    return text.removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):
    """Writes text that ends with a line break as a literal block, and aliases in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if text.endswith("\n") and text.strip() else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
