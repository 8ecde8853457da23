"""`pipe advise`, and the recipe that it or `pipe init` writes."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands import options
from pipeline.commands.options import EXISTING, Count, option
from pipeline.errors import NoFit, UsageError, system_errors_as
from pipeline.utils.files import check_writable

if TYPE_CHECKING:
    from pipeline.chain.registry import Registry
    from pipeline.planning.hardware import HardwareOptions, Margins

COUNT = Count(min=1)


@click.command()
@click.argument("model")
@options.machine
@option("--lora/--full", "Train low-rank updates, or all weights.", show_default="full")
@option("--seq", "sequence", "Tokens in a sample.", type=COUNT, show_default="by the data, or 4096")
@option(
    "--global-batch",
    "Samples in a step, over all processes.",
    type=COUNT,
    show_default="by the data, or 64",
)
@option(
    "--micro-batch",
    "Largest number of samples in a forward pass.",
    type=COUNT,
    show_default="8192 tokens",
)
@option("--data", "Conversations or texts to train on, as JSON lines.", type=EXISTING)
@options.revision
@option(
    "--attention",
    "Attention implementation, for a model that does not support sdpa.",
    show_default="sdpa",
)
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
    Draft(
        model=model, revision=revision, attention=attention, data=data, lora=lora,
        sequence=sequence, global_batch=global_batch, micro_batch=micro_batch, out=out,
        machines=machines, margins=margins, registry=options.registry(),
    ).write()  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A recipe to write, by `pipe advise` or `pipe init`."""

    model: str
    revision: str | None
    attention: str | None = None
    data: Path | None
    lora: bool
    reason: str = ""
    """Why low-rank updates, or all weights, if no one has asked for them."""
    sequence: int | None
    global_batch: int | None = None
    micro_batch: int | None = None
    out: Path | None
    machines: HardwareOptions
    margins: Margins
    registry: Registry
    survey: Any = None
    """The template's survey of the data, if it has made one."""
    shown: Sequence[str] = ()
    """Lines that are on the screen already."""

    def write(self) -> Path:
        """Look at the data, if there is any, write the recipe, say what was chosen and why, and
        return its place. Exits with code 3 where nothing fits. Raises PipeError."""
        from pipeline.distributed.signals import stoppable
        from pipeline.planning.advise import EXAMPLE, look

        place = model_fields(self.model, self.revision)
        if self.attention is not None:
            place["attention"] = self.attention
        target = self.out or Path(f"{recipe_name(self.model)}.yaml")
        require_writable(target)
        example = target.with_suffix(".example.jsonl")
        with stoppable():
            survey = self.survey
            if self.data is not None and survey is None:
                survey = look(place, self.data)
            given = {"model": place, "data": self.data or example, "survey": survey,
                     "folder": target.absolute().parent}  # fmt: skip
            recipe, lines = self._advised(self.lora, self.reason, given)
            if recipe is None and self.reason and not self.lora:
                recipe, lines = self._advised(True, "all weights do not fit", given)
        click.echo("\n".join(line for line in lines if line not in self.shown))
        if recipe is None:
            click.echo("nothing fits: it takes more or larger GPUs, or hosts", err=True)
            sys.exit(NoFit.exit_code)
        # An existing file is the user's, who was asked to put data there.
        made = self.data is None and not example.exists()
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

    def _advised(
        self, lora: bool, reason: str, given: dict[str, Any]
    ) -> tuple[str | None, list[str]]:
        from pipeline.planning.advise import AdviceRequest, advise
        from pipeline.planning.hardware import narrow_dtype

        named = self.out.stem if self.out else self.model
        request = AdviceRequest(
            name=recipe_name(named, lora=lora and not self.out), lora=lora,
            sequence=self.sequence, global_batch=self.global_batch, micro_batch=self.micro_batch,
            ranks=self.machines.procs or 1, on_gpus=self.machines.on_gpus,
            # most CPUs only emulate narrow floats
            compute=narrow_dtype(self.machines) if self.machines.on_gpus else "fp32",
            reasons=(f"{'LoRA' if lora else 'full'}: {reason}",) if reason else (), **given,
        )  # fmt: skip
        return advise(request, self.machines, self.margins, self.registry)


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
    path = Path(model).expanduser()
    path = path.resolve() if path.exists() else Path(model.partition("@")[0])
    base = (path.parent if path.name == "config.json" else path).name.lower()
    words = re.sub(r"[^a-z0-9._-]+", "-", base.removesuffix(".gguf")).strip("-.") or "model"
    return f"{words}-lora" if lora else words


def model_fields(model: str, revision: str | None) -> dict[str, Any]:
    """Fields of the model slot: for a config, the folder of its weights, or the tokenizer next
    to it. Paths are absolute. Raises UsageError."""
    path = Path(model).expanduser().absolute()
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
