"""The option with which a command refuses names of the hub without a commit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from pipeline.utils.hub import PINNED, pins_asked


def pinned_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--pinned`, which sets the environment variable of the same meaning."""
    text = f"Refuse a model or data set of the hub without a commit. [env var: {PINNED}=1]"
    return click.option("--pinned", is_flag=True, expose_value=False, callback=_set, help=text)(
        command
    )


def given() -> list[str]:
    """Return the option, if names without a commit are refused here."""
    return ["--pinned"] if pins_asked() else []


def _set(context: click.Context, parameter: click.Parameter, flag: bool) -> None:
    if flag:
        os.environ[PINNED] = "1"
