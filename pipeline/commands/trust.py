"""The option with which a command reads pickles."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from pipeline.utils.trust import TRUST


def _set(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    if given:
        os.environ[TRUST] = "1"


def trust_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--trust-pickle`, which sets the environment variable of the same meaning."""
    return click.option(
        "--trust-pickle",
        is_flag=True,
        expose_value=False,
        callback=_set,
        help="Read files that are pickles (.bin, .pt, DeepSpeed's and DCP's checkpoints), with a "
        "restricted reader.",
    )(command)
