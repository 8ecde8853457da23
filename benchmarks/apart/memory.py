"""Have the machine's memory in use before something is measured.

A virtual machine gives free memory back to its host, and having it again takes many times what
writing to it takes. Where the page cache has filled the memory, as on machines that work, whoever
needs some takes it from there.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from apart.footprint import unused

PIECE = 8 << 20
ENOUGH = 3 << 30
"""Bytes that may stay unused: systems keep some."""

option = click.option(
    "--fill-memory/--leave-memory",
    "fill",
    default=True,
    show_default=True,
    help="Fill the page cache before every run.",
)
"""Of the benchmarks that can do it; `fill` to them."""


def fill(scratch: Path) -> None:
    """Read a file without content until its pages fill the memory; it stays in `scratch`, and what
    is left of it there need not be fetched again."""
    buffer = bytearray(PIECE)
    with (scratch / "filler").open("ab+", buffering=0) as file:
        file.truncate(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        file.seek(0)
        while unused() > ENOUGH and file.readinto(buffer):
            pass
