"""Commands and options that do not exist: what was meant. Loaded when a command line is wrong."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import click

from pipeline.chain.elsewhere import explained
from pipeline.chain.registry import Registry, kind_of
from pipeline.errors import COMMAND_LINE, Location
from pipeline.importing.translator import of_other_tools
from pipeline.recipe import read_recipe
from pipeline.recipe.includes import by_use
from pipeline.recipe.nodes import UnknownKey
from pipeline.recipe.parse import scalar
from pipeline.utils.text import closest

ALIASES = {
    "run": "train start fit sft finetune pretrain exec",
    "resume": "continue restart",
    "check": "validate lint",
    "plan": "estimate dry-run memory",
    "ls": "list runs ps",
    "export": "merge save",
    "cp": "copy clone recipes",
    "init": "new create wizard",
    "logs": "tail log",
    "status": "watch top monitor",
    "compare": "diff",
    "clean": "rm delete prune",
    "doctor": "env info diagnose",
    "generate": "infer inference predict complete",
}
"""Command -> what other programs call it."""
INSTEAD = (
    ("--config --recipe -c", "recipe", "the recipe needs no option: pipe {command} {value}"),
    ("--resume --resume-from-checkpoint", "--fresh", "pipe resume RUN continues a run"),
    ("--nnodes", "--nodes", "use --nodes {value} --node-rank NUMBER --rdzv HOST:PORT"),
    ("--output-dir --output --to", "--out", "--out names what is written"),
    ("--output-dir --output --to", "--run-dir", "--run-dir names the folder of a run"),
)
"""Options of other programs, the parameter that a command can have for them, and what to write."""


def command_meant(name: str, known: Collection[str]) -> str:
    """Return the hint for a command that there is not."""
    if Path(name).suffix in (".yaml", ".yml"):
        return f"write: pipe run {name}"
    word = name.lower()
    alias = next((command for command, names in ALIASES.items() if word in names.split()), None)
    names = Registry.installed().names()
    kinds = {kind_of(name) for name in names if len(word) > 2 and kind_of(name).startswith(word)}
    # the stage that most recipes use of a kind that begins so, or of this own name
    fitting = [name for name in names if kind_of(name) in kinds or name.endswith(f".{word}")]
    stage = next(iter(by_use(fitting)), "")
    if alias is None and stage and kind_of(stage) not in known:
        return f"it is a slot of a recipe: `pipe stages {stage}` explains it"
    found = alias or closest(name, known)
    return f"did you mean `{found}`?" if found else "pipe --help lists them"


def option_meant(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """Return the hint for an option that a command does not have, in the command line's words after
    `pipe`; empty if click's own is better."""
    if error.ctx is None or not words:
        return ""
    command, option = error.ctx.command, error.option_name
    takes = {name for one in command.params for name in one.opts}
    spelled = option.replace("_", "-")
    if spelled in takes:
        return f"write {spelled}"
    value = _value(option, words)
    for names, parameter, hint in INSTEAD:
        if spelled in names.split() and parameter in takes:
            value = value or parameter.removeprefix("--").upper()
            return hint.format(command=error.ctx.info_name, value=value)
    if "overrides" not in takes:
        return ""
    path = option.lstrip("-")
    if "." in path:
        return f"settings have no dashes: write {path}={value or 'VALUE'}"
    # a field of the recipe, or another tool's name for one
    file = next((word for word in words if Path(word).is_file()), None)
    recipe = read_recipe(file)[0] if file is not None else None
    if recipe is None:
        return ""
    place, keys = Location(file=f"{COMMAND_LINE}option"), (path.replace("-", "_"),)
    key = UnknownKey(message="", location=place, path=keys, value=scalar(value or "VALUE"))
    found = explained([key], recipe, Registry.installed(), of_other_tools)
    return "".join(one.hint for one in found)


def _value(option: str, words: Sequence[str]) -> str:
    """The value that an option was given, after = or as the next word."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return "" if following.startswith("-") or "=" in following else following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
