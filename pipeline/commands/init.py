"""`pipe init`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from pipeline.commands.advise import advise
from pipeline.commands.hardware_options import EXISTING, FILE
from pipeline.errors import UsageError

COUNT = click.IntRange(min=1)


@click.command("init")
@click.option("--model", help="A folder, a hub id, or a GGUF file.")
@click.option("--data", type=EXISTING, help="Conversations or texts, one JSON object a line.")
@click.option("--lora/--full", default=None, help="Train low-rank updates, or all weights.")
@click.option("--seq", type=COUNT, help="Tokens of a sample.")
@click.option("--gpus", type=click.IntRange(min=0), help="GPUs of a node; 0 trains on CPUs.")
@click.option("--gpu", help="Kind of GPU, as in H100.")
@click.option("--nodes", type=COUNT, help="Nodes.")
@click.option("--revision", help="Commit, branch or tag of a hub model. [default: main]")
@click.option("--out", type=FILE, help="The recipe to write (default: MODEL.yaml).")
@click.option("-y", "--yes", is_flag=True, help="Ask nothing; take the defaults.")
@click.pass_context
def init(context: click.Context, /, *, yes: bool, out: Path | None, **given: Any) -> None:
    """Write a recipe that passes `pipe check` and fits, from a few answers or options.

    Everything that is not given as an option is asked for. The strategy is chosen as by `pipe
    advise`.
    """
    answers = _answers(given, asks=not yes and sys.stdin.isatty())
    target = out or Path(f"{_name(answers['model'])}.yaml")
    context.invoke(advise, out=target, **answers)
    _check(target)


def _name(model: str) -> str:
    """Return the last part of a model's path or hub id, in small letters."""
    path = Path(model)
    return (path.resolve() if path.exists() else path).name.removesuffix(".gguf").lower()


def _answers(given: dict[str, Any], *, asks: bool) -> dict[str, Any]:
    """Return options of `pipe advise`: those that are given, and answers to questions. Raises
    UsageError where nobody can be asked for what has no default."""
    from pipeline.hardware.gpus import gpu_count

    if not asks:
        missing = [f"--{name}" for name in ("model", "data") if given[name] is None]
        if missing:
            raise UsageError(f"say {' and '.join(missing)}", hint="in a terminal, you are asked")
    found = gpu_count()
    questions: dict[str, tuple[str, Any, Any]] = {
        "model": ("Model: a folder, a hub id or a GGUF file", None, str),
        "data": ("Data: a file of one JSON object a line", None, EXISTING),
        "lora": ("Train low-rank updates alone (LoRA)", True, bool),
        "seq": ("Tokens of a sample", 2048, COUNT),
        "gpus": ("GPUs of a node, 0 for CPUs", found, click.IntRange(min=0)),
    }
    answers = dict(given)
    for name, (question, default, kind) in questions.items():
        if answers[name] is None:
            answers[name] = _asked(question, default, kind) if asks else default
    if answers["gpus"] and answers["gpu"] is None and asks:
        answers["gpu"] = click.prompt("Kind of GPU", _kind_here() or "H100")
    of_gpus = [f"--{name}" for name in ("gpu", "nodes") if given[name] is not None]
    if of_gpus and not answers["gpus"]:
        raise UsageError(f"{' and '.join(of_gpus)}: there are no GPUs", hint="say --gpus N")
    if not answers["gpus"]:
        answers |= {"gpus": None, "gpu": None, "nodes": None}
    elif answers["gpu"] is None:
        answers["gpu"] = _kind_here()
    return answers


def _asked(question: str, default: Any, kind: Any) -> Any:
    """Return the answer that is typed; one that is not of its kind is asked for again."""
    if kind is bool:
        return click.confirm(question, default)
    return click.prompt(question, default, type=kind)


def _kind_here() -> str | None:
    """Return the kind of this machine's GPUs, if it is known."""
    from pipeline.hardware.telemetry import Telemetry

    return Telemetry().kind


def _check(target: Path) -> None:
    """Check the recipe on this machine, and say what to do next. Raises RecipeError."""
    from pipeline.chain.plan import plan_file

    for warning in plan_file(target, forecast=True).warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"\nit passes pipe check; next:\n  pipe run {shlex.quote(str(target))}")
