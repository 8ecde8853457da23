"""The options with which a command reads pickles, and runs code that is no installed stage."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from pipeline.utils.trust import TRUST_CODE, TRUST_PICKLE, trusted

F = TypeVar("F", bound=Callable[..., Any])
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


def _setting(variable: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def set_if_given(context: click.Context, parameter: click.Parameter, flag: bool) -> None:
        if flag:
            os.environ[variable] = "1"

    return set_if_given


def _trust_option(flag: str, text: str) -> Callable[[F], F]:
    setting = _setting(OPTIONS[flag][0])
    return click.option(flag, is_flag=True, expose_value=False, callback=setting, help=text)


code_option = _trust_option("--trust-remote-code", "Run model code that came with the model.")
"""The one option of a command that reads a folder instead of a recipe."""


def trust_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options, each of which sets the environment variable of the same meaning."""
    for flag, (_, text) in reversed(OPTIONS.items()):
        command = _trust_option(flag, text)(command)
    return command


def given() -> list[str]:
    """The options that are in force."""
    return [flag for flag, (variable, _) in OPTIONS.items() if trusted(variable)]
