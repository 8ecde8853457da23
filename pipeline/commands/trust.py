"""The options with which a command reads pickles, and runs code that is no installed stage."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from pipeline.utils.trust import TRUST_CODE, TRUST_PICKLE, trusted

OPTIONS = {
    "--trust-pickle": (
        TRUST_PICKLE,
        "Read pickles (.bin, .pt, checkpoints of DeepSpeed and DCP) with a restricted reader.",
    ),
    "--trust-remote-code": (
        TRUST_CODE,
        "Run code of a model, of a folder of tasks or of a hub kernel, if the recipe asks for it.",
    ),
}


def trust_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options, each of which sets the environment variable of the same meaning."""
    for flag, (variable, text) in reversed(OPTIONS.items()):
        command = click.option(
            flag, is_flag=True, expose_value=False, callback=_setting(variable), help=text
        )(command)
    return command


def given() -> list[str]:
    """The options that are in force."""
    return [flag for flag, (variable, _) in OPTIONS.items() if trusted(variable)]


def _setting(variable: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def set_if_given(context: click.Context, parameter: click.Parameter, flag: bool) -> None:
        if flag:
            os.environ[variable] = "1"

    return set_if_given
