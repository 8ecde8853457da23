"""`pipe init`."""

from __future__ import annotations

import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from pipeline.commands import options
from pipeline.commands.advise import (
    COUNT,
    Draft,
    model_fields,
    recipe_name,
    require_whole,
    require_writable,
)
from pipeline.commands.options import EXISTING, Count, flag, option
from pipeline.errors import UsageError


@click.command("init", context_settings={"allow_extra_args": True})
@option("--model", "A folder, a hub id, or a GGUF file.")
@option("--data", "Conversations or texts to train on, as JSON lines.", type=EXISTING)
@option("--lora/--full", "Train low-rank updates, or all weights.", default=None)
@option("--seq", "Tokens in a sample.", type=COUNT, show_default="by the data")
@option("--gpus", "GPUs in a node; 0 trains on CPUs.", type=Count(min=0))
@option("--gpu", "Kind of GPU, such as H100.")
@option("--nodes", "Number of nodes.", type=COUNT)
@options.revision
@options.out("Recipe to write.", default="MODEL.yaml")
@flag("-y", "--yes", "Ask nothing and take the defaults.")
def init(
    model: str | None, data: Path | None, lora: bool | None, seq: int | None,
    revision: str | None, out: Path | None, yes: bool, **hardware: Any,
) -> None:  # fmt: skip
    """Write a recipe for a model and data that passes `pipe check` and fits.

    Looks at the data: its rows, the broken ones, and their lengths in tokens decide the sequence
    length, epochs, batch, evaluations and checkpoints. Each choice is said with its reason, and is
    a comment of the recipe. What is not given as an option is asked for. The strategy is chosen as
    by `pipe advise`.
    """
    from pipeline.chain.plan import plan_file
    from pipeline.planning.advise import look

    _require_no_arguments()
    asks = not yes and sys.stdin.isatty()
    missing = [f"--{n}" for n, value in (("model", model), ("data", data)) if value is None]
    if missing and not asks:
        raise UsageError(f"say {' and '.join(missing)}", hint="in a terminal, you are asked")
    if not hardware["gpus"] and not asks:
        _require_gpus(hardware)
    # an answer that is not of its kind is asked for again
    model = model or click.prompt("Model: a folder, a hub id or a GGUF file")
    data = data or click.prompt("Data: a file of one JSON object a line", type=EXISTING)
    target = out or Path(f"{recipe_name(model)}.yaml")
    require_writable(target)
    survey = look(model_fields(model, revision), data)
    found = [*survey.lines()] if asks else []
    click.echo("\n".join(found), nl=bool(found))
    low_rank, reason = _low_rank(lora, survey, asks=asks)
    machines, margins = options.machines(**_hardware(hardware, asks=asks))
    require_whole(machines)
    Draft(
        model=model, revision=revision, data=data, lora=low_rank, reason=reason, sequence=seq,
        out=target, machines=machines, margins=margins, survey=survey, shown=found,
        registry=options.registry(),
    ).write()  # fmt: skip
    for warning in plan_file(target, forecast=True).warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"\nit passes pipe check; next:\n  pipe run {shlex.quote(str(target))}")


def _require_no_arguments() -> None:
    """Raise UsageError for a model and data without their options."""
    words = click.get_current_context().args
    if words:
        is_data = Path(words[0]).is_file() and not words[0].endswith(".gguf")
        named = ["--data"] if len(words) == 1 and is_data else ["--model", "--data"]
        line = shlex.join(itertools.chain(*zip(named, words, strict=False)))
        raise UsageError(f"{words[0]} has no option in front", hint=f"write {line}")


def _low_rank(given: bool | None, survey: Any, *, asks: bool) -> tuple[bool, str]:
    """Return whether low-rank updates are trained, and why, if no one has said so."""
    from pipeline.planning.advise import Templates

    if given is not None:
        return given, ""
    prefers, why = Templates.finetune().prefers_low_rank(survey)
    if not asks:
        return prefers, why
    click.echo(f"{'LoRA' if prefers else 'full'}: {why}")
    answer = click.confirm("Train low-rank updates only (LoRA)", prefers)
    return answer, why if answer is prefers else ""


def _require_gpus(hardware: dict[str, Any]) -> None:
    """Raise UsageError for options of GPUs that are not there."""
    from pipeline.hardware.gpus import gpu_count

    of_gpus = [f"--{name}" for name in ("gpu", "nodes") if hardware[name] is not None]
    if of_gpus and not (gpu_count() if hardware["gpus"] is None else hardware["gpus"]):
        raise UsageError(f"{' and '.join(of_gpus)}: there are no GPUs", hint="say --gpus N")


def _hardware(given: dict[str, Any], *, asks: bool) -> dict[str, Any]:
    """Return options of machines: given ones, and answers to questions."""
    from pipeline.hardware.gpus import gpu_count
    from pipeline.hardware.telemetry import Telemetry

    gpus, gpu = given["gpus"], given["gpu"]
    if gpus is None:
        gpus = gpu_count()
        if asks:
            gpus = click.prompt("GPUs of a node, 0 for CPUs", gpus, type=Count(min=0))
    _require_gpus({**given, "gpus": gpus})
    if not gpus:
        return {}
    if gpu is None:
        gpu = Telemetry().kind
        if asks:
            gpu = click.prompt("Kind of GPU", gpu or "H100")
    return {**given, "gpus": gpus, "gpu": gpu}
