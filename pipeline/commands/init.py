"""`pipe init`."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pipeline.chain.registry import Registry
from pipeline.commands.advise import Draft, recipe_name, require_whole, require_writable, where
from pipeline.commands.hardware_options import EXISTING, asked_for
from pipeline.commands.options import Count, out_option
from pipeline.errors import UsageError

COUNT = Count(min=1)


@click.command("init", context_settings={"allow_extra_args": True})
@click.option("--model", help="A folder, a hub id, or a GGUF file.")
@click.option("--data", type=EXISTING, help="Conversations or texts to train on, as JSON lines.")
@click.option("--lora/--full", default=None, help="Train low-rank updates, or all weights.")
@click.option("--seq", type=COUNT, show_default="by the data", help="Tokens in a sample.")
@click.option("--gpus", type=Count(min=0), help="GPUs in a node; 0 trains on CPUs.")
@click.option("--gpu", help="Kind of GPU, such as H100.")
@click.option("--nodes", type=COUNT, help="Number of nodes.")
@click.option("--revision", show_default="main", help="Commit, branch or tag of a hub model.")
@out_option("Recipe to write.", default="MODEL.yaml")
@click.option("-y", "--yes", is_flag=True, help="Ask nothing and take the defaults.")
@click.pass_obj
def init(
    registry: Registry | None,
    /,
    *,
    model: str | None,
    data: Path | None,
    lora: bool | None,
    seq: int | None,
    revision: str | None,
    out: Path | None,
    yes: bool,
    **hardware: Any,
) -> None:
    """Write a recipe for a model and data that passes `pipe check` and fits.

    Looks at the data: its rows, the broken ones, and their lengths in tokens decide the sequence
    length, epochs, batch, evaluations and checkpoints. Each choice is said with its reason, and is
    a comment of the recipe. What is not given as an option is asked for. The strategy is chosen as
    by `pipe advise`.
    """
    from pipeline.chain.plan import plan_file
    from pipeline.planning.advise import look

    _no_arguments(click.get_current_context().args)
    asks = not yes and sys.stdin.isatty()
    missing = [f"--{n}" for n, value in (("model", model), ("data", data)) if value is None]
    if missing and not asks:
        raise UsageError(f"say {' and '.join(missing)}", hint="in a terminal, you are asked")
    if not hardware["gpus"] and not asks:
        _require_gpus(hardware)
    model = model or str(_asked("Model: a folder, a hub id or a GGUF file", None, str))
    data = data or Path(_asked("Data: a file of one JSON object a line", None, EXISTING))
    target = out or Path(f"{recipe_name(model)}.yaml")
    require_writable(target)
    survey = look(where(model, revision), data)
    found = [*survey.lines()] if asks else []
    click.echo("\n".join(found), nl=bool(found))
    low_rank, reason = _low_rank(lora, survey, asks=asks)
    machines, margins = asked_for(**_machines(hardware, asks=asks))
    require_whole(machines)
    Draft(
        model=model, revision=revision, data=data, lora=low_rank, reason=reason, sequence=seq,
        out=target, machines=machines, margins=margins, survey=survey, shown=found,
        registry=registry or Registry.installed(),
    ).write()  # fmt: skip
    for warning in plan_file(target, forecast=True).warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"\nit passes pipe check; next:\n  pipe run {shlex.quote(str(target))}")


def _low_rank(given: bool | None, survey: Any, *, asks: bool) -> tuple[bool, str]:
    """Return whether low-rank updates are trained, and why, if no one has said so."""
    from pipeline.planning.advise import Templates

    if given is not None:
        return given, ""
    prefers, why = Templates.finetune().prefers_low_rank(survey)
    if not asks:
        return prefers, why
    click.echo(f"{'LoRA' if prefers else 'full'}: {why}")
    answer = _asked("Train low-rank updates only (LoRA)", prefers, bool)
    return answer, why if answer is prefers else ""


def _no_arguments(words: Sequence[str]) -> None:
    """Raise UsageError for a model and data without their options."""
    if words:
        options = ["--model", "--data"]
        if len(words) == 1 and Path(words[0]).is_file() and not words[0].endswith(".gguf"):
            options = ["--data"]
        named = itertools.chain(*zip(options, words, strict=False))
        raise UsageError(f"{words[0]} has no option in front", hint=f"write {shlex.join(named)}")


def _require_gpus(hardware: dict[str, Any]) -> None:
    """Raise UsageError for options of GPUs that are not there."""
    from pipeline.hardware.gpus import gpu_count

    of_gpus = [f"--{name}" for name in ("gpu", "nodes") if hardware[name] is not None]
    if of_gpus and not (gpu_count() if hardware["gpus"] is None else hardware["gpus"]):
        raise UsageError(f"{' and '.join(of_gpus)}: there are no GPUs", hint="say --gpus N")


def _machines(given: dict[str, Any], *, asks: bool) -> dict[str, Any]:
    """Return options of machines: given ones, and answers to questions."""
    from pipeline.hardware.gpus import gpu_count
    from pipeline.hardware.telemetry import Telemetry

    found, none = dict(given), dict.fromkeys(OTHERS)
    if found["gpus"] is None:
        here, least = gpu_count(), Count(min=0)
        found["gpus"] = _asked("GPUs of a node, 0 for CPUs", here, least) if asks else here
    _require_gpus(found)
    if not found["gpus"]:
        return none | dict.fromkeys(found)
    if found["gpu"] is None:
        kind = Telemetry().kind
        found["gpu"] = click.prompt("Kind of GPU", kind or "H100") if asks else kind
    return none | found


OTHERS = ("nvme", "overhead", "measured", "machine")
"""Options of machines that are not asked for."""


def _asked(question: str, default: Any, kind: Any) -> Any:
    """Return the answer that is typed; one that is not of its kind is asked for again."""
    if kind is bool:
        return click.confirm(question, default)
    return click.prompt(question, default, type=kind)
