"""`pipe advise`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.machines import GPUS, NODES, asked_for, machine_options
from pipeline.errors import NoFit, UsageError, system_errors_as
from pipeline.files import try_writing
from pipeline.registry import Registry

if TYPE_CHECKING:
    from pipeline.planning.hardware import Asked

EXAMPLE = [
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]},
    {"messages": [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}]},
]
"""Rows of the data that the recipe names when none is given."""
COUNT = click.IntRange(min=1)
FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command()
@click.argument("model")
@click.option("--gpus", type=GPUS, help="GPUs of a node. Without any: this machine's CPUs.")
@click.option("--nodes", type=NODES, help="Nodes of so many GPUs. Default: 1.")
@machine_options
@click.option("--full/--lora", default=True, help="Train all weights, or low-rank updates.")
@click.option("--seq", type=COUNT, default=4096, show_default=True, help="Tokens of a sample.")
@click.option("--global-batch", type=COUNT, help="Samples of a step. Default: 64, or one a GPU.")
@click.option("--micro-batch", type=COUNT, help="Most samples of a pass. Default: 32768 tokens.")
@click.option("--data", type=EXISTING, help="Conversations, JSON.")
@click.option("--revision", help="Commit of a hub model.")
@click.option("--attention", help="How it is computed, for a model that cannot have sdpa.")
@click.option("--out", type=FILE, help="Where to write the recipe.")
@click.pass_obj
def advise(
    registry: Registry | None,
    /,
    model: str,
    gpus: int | None,
    nodes: int | None,
    full: bool,
    seq: int,
    global_batch: int | None,
    micro_batch: int | None,
    data: Path | None,
    revision: str | None,
    attention: str | None,
    out: Path | None,
    **machines: Any,
) -> None:
    """Find how to train MODEL on given GPUs, or on CPUs, and write its recipe.

    MODEL is a folder, a hub id, a GGUF file or a config.json. What only costs time is tried before
    what changes how it is computed (moments, master weights, frozen weights in fewer bits), that
    before offloading. Of what fits, a step that is estimated to be the shortest is taken. Other
    ways are shown with what they would need. Exit code 3 when nothing fits.
    """
    from pipeline.commands.stopping import stoppable
    from pipeline.planning.advise import advise as walk
    from pipeline.planning.draft import Task

    asked, margins = asked_for(gpus, nodes, **machines)
    _require_whole(asked)
    where = _where(model, revision) | ({} if attention is None else {"attention": attention})
    name = _name(model, lora=not full)
    target = out or Path(f"{name}.yaml")
    if target.exists():
        raise UsageError(f"{target} exists", hint="name another file with --out")
    with system_errors_as(UsageError):
        try_writing(target)
    example = target.with_suffix(".example.jsonl")
    # One that is there is the user's, who was told to put data there.
    made = data is None and not example.exists()
    if made:
        with system_errors_as(UsageError):
            example.write_text("".join(json.dumps(row) + "\n" for row in EXAMPLE), "utf-8")
    task = Task(
        name=name, model=where, data=data or example, lora=not full,
        sequence=seq, global_batch=global_batch, micro_batch=micro_batch,
    )  # fmt: skip
    written = False
    try:
        with stoppable():
            recipe, lines = walk(task, asked, margins, registry or Registry.installed())
        click.echo("\n".join(lines))
        if recipe is not None:
            with system_errors_as(UsageError):
                target.write_text(recipe, "utf-8")
            written = True
    finally:
        if made and not written:
            example.unlink()
    if not written:
        click.echo("nothing fits: it takes more or larger GPUs, or hosts", err=True)
        sys.exit(NoFit.exit_code)
    yours = f"; its data is an example in {example}: put yours there" if made else ""
    click.echo(f"\nwritten: {target}{yours}")
    if "config" in where:
        unnamed = ", and names no tokenizer: say model.tokenizer"
        click.echo(f"it starts from random weights{'' if 'tokenizer' in where else unnamed}")


def _require_whole(asked: Asked) -> None:
    """Raises UsageError where GPUs are meant, and it is not said how many, or of what kind."""
    machine = asked.machine is not None and asked.machine.device != "cpu"
    known = machine or asked.gpu is not None or asked.memory is not None
    if asked.gpus is None and (known or asked.nodes is not None):
        raise UsageError("say how many GPUs a node has", hint="--gpus 8")
    if asked.gpus is not None and not known:
        raise UsageError(
            "say what GPUs these are", hint="--gpu H100, or --memory 80, or --machine FILE"
        )


def _name(model: str, *, lora: bool) -> str:
    base = Path(model).name if Path(model).name != "config.json" else Path(model).parent.name
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", base.removesuffix(".gguf")).strip("-.") or "model"
    return f"{words}-lora" if lora else words


def _declared(config: Path) -> dict[str, Any]:
    """The folder of a config that has its weights, or else the config, with the tokenizer beside
    it."""
    folder = config.parent
    if config.name == "config.json" and any(folder.glob("*.safetensors")):
        return {"path": str(folder)}
    there = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
    return {"config": str(config), **({"tokenizer": str(folder)} if there else {})}


def _where(model: str, revision: str | None) -> dict[str, Any]:
    """What the model is. A path is written so that it means the same from anywhere."""
    path = Path(model).expanduser()
    if not model or (model[0] in "./~" and not path.exists()):
        raise UsageError(f"there is no such model: {model or 'its name is empty'}")
    if path.name.endswith(".json") and path.is_file():
        return _declared(path.absolute())
    if path.exists():
        return {"path": str(path.absolute())}
    if revision is not None:
        return {"path": model, "revision": revision}
    return {"path": model, "allow_floating_revision": True}
