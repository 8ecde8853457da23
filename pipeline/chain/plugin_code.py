"""Errors in the code of plugins: the line, and the stage and the package that it belongs to."""

from __future__ import annotations

import traceback

from pipeline.chain.registry import BUILT_IN, GROUP, Entry, installed_entries


def line_in(error: BaseException, module: str) -> str:
    """`file:line` of the innermost code of a module, or of one next to it whose name begins alike;
    empty if the error comes from elsewhere."""
    package = _package(module)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _belongs(_package(frame.f_globals.get("__name__", "")), package):
            found = f"{frame.f_code.co_filename}:{line}"
    return found


def culprit(error: BaseException) -> Entry | None:
    """The stage of an installed plugin whose code has failed, in itself or in a library that it
    called; None for an error in pipetrain."""
    entries = [one for one in installed_entries(GROUP) if one.distribution != BUILT_IN]
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = _package(frame.f_globals.get("__name__", ""))
        if package in ("pipeline", "stages"):
            found = None
        else:
            found = next((e for e in entries if _belongs(package, _package(e.value))), found)
    return found


def line_in_plugin(error: BaseException) -> str:
    """`file:line in function` of the innermost code of an installed plugin, whatever it called;
    empty without any."""
    plugins = [one for one in installed_entries(GROUP) if one.distribution != BUILT_IN]
    packages = {_package(one.value) for one in plugins}
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = _package(frame.f_globals.get("__name__", ""))
        if any(_belongs(package, each) for each in packages):
            found = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return found


def _package(module: str) -> str:
    return module.partition(":")[0].partition(".")[0]


def _belongs(package: str, to: str) -> bool:
    return package == to or package.startswith(f"{to}_")
