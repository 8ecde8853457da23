"""`pipe advise` and `pipe init`: write a recipe for a model."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands import options
from pipeline.commands.options import EXISTING, Count, flag, option
from pipeline.errors import NoFit, UsageError, system_errors_as
from pipeline.utils.files import check_writable, expanded

if TYPE_CHECKING:
    from pipeline.chain.registry import Registry
    from pipeline.planning.hardware import HardwareOptions, Margins

COUNT = Count(min=1)


@click.command()
@click.argument("model")
@options.machine
@option("--lora/--full", "Train low-rank updates, or all weights.", show_default="full")
@option("--seq", "sequence", "Tokens in a sample.", type=COUNT, show_default="by the data, or 4096")
@option("--global-batch", "Samples in a step, over all processes.", type=COUNT,
        show_default="by the data, or 64")  # fmt: skip
@option("--micro-batch", "Largest number of samples in a forward pass.", type=COUNT,
        show_default="8192 tokens")  # fmt: skip
@option("--data", "Conversations or texts to train on, as JSON lines.", type=EXISTING)
@options.revision
@option("--attention", "Attention implementation, for a model that does not support sdpa.",
        show_default="sdpa")  # fmt: skip
@options.out("Recipe to write.", default="MODEL.yaml")
@options.trust
def advise(
    model: str, lora: bool, sequence: int | None, global_batch: int | None,
    micro_batch: int | None, data: Path | None, revision: str | None, attention: str | None,
    out: Path | None, **hardware: Any,
) -> None:  # fmt: skip
    """Find a strategy that trains MODEL on given GPUs, or on this machine's CPUs; write its recipe.

    MODEL is a folder, a hub id (ID or ID@REVISION), a GGUF file or a config.json. Tries savings
    that only cost time first, then savings that change the numbers (optimizer state, master weights
    or frozen weights in fewer bits), then offloading. Chooses one of the fastest strategies that
    fit and lists the others with their memory. With --data, the rows decide lengths, epochs, batch,
    evaluations and checkpoints. Exit code 3 if nothing fits."""
    machines, margins = options.machines(**hardware)
    require_whole(machines)
    write_recipe(
        model=model, revision=revision, attention=attention, data=data, lora=lora,
        sequence=sequence, global_batch=global_batch, micro_batch=micro_batch, out=out,
        machines=machines, margins=margins, registry=options.registry(),
    )  # fmt: skip


def write_recipe(
    *, model: str, revision: str | None, attention: str | None = None, data: Path | None,
    lora: bool, reason: str = "", sequence: int | None, global_batch: int | None = None,
    micro_batch: int | None = None, out: Path | None, machines: HardwareOptions, margins: Margins,
    registry: Registry, survey: Any = None, shown: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Look at the data, if there is any, write the recipe, say what was chosen and why, and return
    its place. Exits with code 3 where nothing fits. Raises PipeError.

    `reason` says why low-rank updates, or all weights, if no one has asked for them. `survey` is
    the template's of the data, if it has made one. Lines in `shown` are on the screen already."""
    from pipeline.distributed.signals import stoppable
    from pipeline.planning.advise import EXAMPLE, AdviceRequest, look
    from pipeline.planning.advise import advise as advise_on
    from pipeline.planning.hardware import narrow_dtype

    place = model_fields(model, revision)
    if attention is not None:
        place["attention"] = attention
    target = out or Path(f"{recipe_name(model)}.yaml")
    require_writable(target)
    example = target.with_suffix(".example.jsonl")
    with stoppable():
        request = AdviceRequest(
            name=out.stem if out else model, model=place, data=data or example, lora=lora,
            sequence=sequence, global_batch=global_batch, micro_batch=micro_batch,
            ranks=machines.procs or 1, on_gpus=machines.on_gpus,
            # most CPUs only emulate narrow floats
            compute=narrow_dtype(machines) if machines.on_gpus else "fp32",
            survey=look(place, data) if data is not None and survey is None else survey,
            folder=target.absolute().parent,
            reasons=(f"{'LoRA' if lora else 'full'}: {reason}",) if reason else (),
        )  # fmt: skip
        tries = [request]
        if reason and not lora:
            reasons = ("LoRA: all weights do not fit",)
            tries.append(replace(request, lora=True, reasons=reasons))
        for each in tries:
            name = recipe_name(each.name, lora=each.lora and not out)
            recipe, lines = advise_on(replace(each, name=name), machines, margins, registry)
            if recipe is not None:
                break
    click.echo("\n".join(line for line in lines if line not in shown))
    if recipe is None:
        click.echo("nothing fits: it takes more or larger GPUs, or hosts", err=True)
        sys.exit(NoFit.exit_code)
    # An existing file is the user's, who was asked to put data there.
    made = data is None and not example.exists()
    with system_errors_as(UsageError):
        target.write_text(recipe, "utf-8")
        if made:
            example.write_text(EXAMPLE, "utf-8")
    yours = f"; its data is an example in {example}: put yours there" if made else ""
    click.echo(f"\nwritten: {target}{yours}")
    if "config" in place:
        unnamed = ", and names no tokenizer: set model.tokenizer"
        click.echo(f"it starts from random weights{'' if 'tokenizer' in place else unnamed}")
    return target


def require_writable(target: Path) -> None:
    """Raise UsageError for a file that exists, or that cannot be written."""
    if target.exists():
        raise UsageError(f"{target} exists", hint="name another file with --out")
    with system_errors_as(UsageError):
        check_writable(target)


def require_whole(machines: HardwareOptions) -> None:
    """Raise UsageError for GPUs without their number or their kind."""
    known = machines.kind is not None or machines.memory is not None
    if machines.gpus is None and (known or machines.nodes is not None):
        raise UsageError("say how many GPUs a node has", hint="--gpus 8")
    if machines.gpus is not None and not known:
        hint = "--gpu H100, or --memory 80, or --machine FILE"
        raise UsageError("name the kind of the GPUs", hint=hint)


def recipe_name(model: str, *, lora: bool = False) -> str:
    """Name of a recipe for a model: the last part of its path or hub id, in small letters."""
    path = expanded(model)
    path = path.resolve() if path.exists() else Path(model.partition("@")[0])
    base = (path.parent if path.name == "config.json" else path).name.lower()
    words = re.sub(r"[^a-z0-9._-]+", "-", base.removesuffix(".gguf")).strip("-.") or "model"
    return f"{words}-lora" if lora else words


def model_fields(model: str, revision: str | None) -> dict[str, Any]:
    """Fields of the model slot: for a config, the folder of its weights, or the tokenizer next
    to it. Paths are absolute. Raises UsageError."""
    path = expanded(model).absolute()
    if not model or (model[0] in "./~" and not path.exists()):
        raise UsageError(f"there is no such model: {model or 'its name is empty'}")
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        raise UsageError(f"{model} is a recipe", hint=f"pipe plan {model} says what it needs")
    if not path.exists():
        repo, _, written = model.partition("@")
        if written and revision:
            raise UsageError(f"--revision {revision} and {model} both name a revision")
        return {"path": repo} | ({"revision": written or revision} if written or revision else {})
    if path.is_dir():
        # a GGUF file may be all that a folder has of a model
        found = [] if (path / "config.json").exists() else list(path.glob("*.gguf"))
        return {"path": str(found[0] if len(found) == 1 else path)}
    if path.suffix != ".json":
        return {"path": str(path)}
    if path.name == "config.json" and any(path.parent.glob("*.safetensors")):
        return {"path": str(path.parent)}
    tokenizer = any(path.parent.glob("tokenizer*.json"))
    return {"config": str(path)} | ({"tokenizer": str(path.parent)} if tokenizer else {})


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
    from pipeline.planning.advise import Templates, look

    words = click.get_current_context().args  # a model and data without their options
    if words:
        is_data = Path(words[0]).is_file() and not words[0].endswith(".gguf")
        named = ["--data"] if len(words) == 1 and is_data else ["--model", "--data"]
        line = shlex.join(itertools.chain(*zip(named, words, strict=False)))
        raise UsageError(f"{words[0]} has no option in front", hint=f"write {line}")
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
    low_rank, reason = lora, ""
    if low_rank is None:
        low_rank, reason = Templates.finetune().prefers_low_rank(survey)
        if asks:
            click.echo(f"{'LoRA' if low_rank else 'full'}: {reason}")
            answer = click.confirm("Train low-rank updates only (LoRA)", low_rank)
            low_rank, reason = answer, reason if answer is low_rank else ""
    machines, margins = options.machines(**_hardware(hardware, asks=asks))
    require_whole(machines)
    write_recipe(
        model=model, revision=revision, data=data, lora=low_rank, reason=reason, sequence=seq,
        out=target, machines=machines, margins=margins, survey=survey, shown=found,
        registry=options.registry(),
    )  # fmt: skip
    for warning in plan_file(target, forecast=True).warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"\nit passes pipe check; next:\n  pipe run {shlex.quote(str(target))}")


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
