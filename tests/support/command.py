"""`pipe` in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from pipeline.cli import main


def pipe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])
