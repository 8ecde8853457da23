"""`pipe advise`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.chain.registry import Registry
from pipeline.commands.hardware_options import EXISTING, FILE, asked_for, machine_options
from pipeline.commands.trust import trust_options
from pipeline.errors import NoFit, UsageError, system_errors_as
from pipeline.utils.files import try_writing

if TYPE_CHECKING:
    from pipeline.planning.hardware import HardwareOptions

COUNT = click.IntRange(min=1)


@click.command()
@click.argument("model")
@machine_options
@click.option("--lora/--full", help="Train low-rank updates, or all weights.")
@click.option("--seq", type=COUNT, default=4096, show_default=True, help="Tokens of a sample.")
@click.option("--global-batch", type=COUNT, help="Samples of a step. Default: 64, or one a GPU.")
@click.option("--micro-batch", type=COUNT, help="Most samples of a pass. Default: 8192 tokens.")
@click.option("--data", type=EXISTING, help="Conversations, JSON.")
@click.option("--revision", help="Commit, branch or tag of a hub model. [default: main]")
@click.option("--attention", help="How it is computed, for a model that cannot have sdpa.")
@click.option("--out", type=FILE, help="Where to write the recipe.")
@trust_options
@click.pass_obj
def advise(
    registry: Registry | None,
    /,
    model: str,
    lora: bool,
    seq: int,
    global_batch: int | None,
    micro_batch: int | None,
    data: Path | None,
    revision: str | None,
    attention: str | None,
    out: Path | None,
    **hardware: Any,
) -> None:
    """Find how to train MODEL on given GPUs, or on this machine's CPUs, and write its recipe.

    MODEL is a folder, a hub id (ID or ID@REVISION), a GGUF file or a config.json. Savings that only
    cost time are tried before those that change what is computed (optimizer state, master weights,
    frozen weights in fewer bits), and these before offloading. Among strategies that fit, one with
    about the shortest step is chosen; the others are listed with their memory. Exit code 3 when
    nothing fits.
    """
    from pipeline.distributed.signals import stoppable
    from pipeline.planning.advise import EXAMPLE, AdviceRequest
    from pipeline.planning.advise import advise as find
    from pipeline.planning.hardware import narrow_dtype

    machines, margins = asked_for(**hardware)
    _require_whole(machines)
    where = _where(model, revision) | ({} if attention is None else {"attention": attention})
    name = _name(model, lora=lora)
    target = out or Path(f"{name}.yaml")
    if target.exists():
        raise UsageError(f"{target} exists", hint="name another file with --out")
    with system_errors_as(UsageError):
        try_writing(target)
    example = target.with_suffix(".example.jsonl")
    task = AdviceRequest(
        name=name, model=where, data=data or example, lora=lora,
        sequence=seq, global_batch=global_batch, micro_batch=micro_batch,
        ranks=machines.procs or 1, on_gpus=machines.on_gpus,
        # most CPUs only emulate narrow floats
        compute=narrow_dtype(machines) if machines.on_gpus else "fp32",
    )  # fmt: skip
    with stoppable():
        recipe, lines = find(task, machines, margins, registry or Registry.installed())
    click.echo("\n".join(lines))
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
    if "config" in where:
        unnamed = ", and names no tokenizer: say model.tokenizer"
        click.echo(f"it starts from random weights{'' if 'tokenizer' in where else unnamed}")


def _require_whole(machines: HardwareOptions) -> None:
    """Raise UsageError for GPUs without their number or their kind."""
    known = machines.kind is not None or machines.memory is not None
    if machines.gpus is None and (known or machines.nodes is not None):
        raise UsageError("say how many GPUs a node has", hint="--gpus 8")
    if machines.gpus is not None and not known:
        hint = "--gpu H100, or --memory 80, or --machine FILE"
        raise UsageError("name the kind of the GPUs", hint=hint)


def _name(model: str, *, lora: bool) -> str:
    base = Path(model).name if Path(model).name != "config.json" else Path(model).parent.name
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", base.removesuffix(".gguf")).strip("-.") or "model"
    return f"{words}-lora" if lora else words


def _where(model: str, revision: str | None) -> dict[str, Any]:
    """Fields of the model slot: for a config, the folder of its weights, or the tokenizer beside
    it. Paths are absolute."""
    path = Path(model).expanduser().absolute()
    if not model or (model[0] in "./~" and not path.exists()):
        raise UsageError(f"there is no such model: {model or 'its name is empty'}")
    if not path.exists():
        repo, _, written = model.partition("@")
        if written and revision:
            raise UsageError(f"--revision {revision} and {model} both name a revision")
        return {"path": repo} | ({"revision": written or revision} if written or revision else {})
    folder = path.parent
    if path.is_dir():
        return {"path": str(_weights_in(path))}
    if path.suffix != ".json":
        return {"path": str(path)}
    if path.name == "config.json" and any(folder.glob("*.safetensors")):
        return {"path": str(folder)}
    return {"config": str(path)} | (
        {"tokenizer": str(folder)} if any(folder.glob("tokenizer*.json")) else {}
    )


def _weights_in(folder: Path) -> Path:
    """Return the GGUF file that is all a folder has of a model, else the folder."""
    found = [] if (folder / "config.json").exists() else list(folder.glob("*.gguf"))
    return found[0] if len(found) == 1 else folder
