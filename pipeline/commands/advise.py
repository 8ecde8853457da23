"""`pipe advise`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.chain.registry import Registry
from pipeline.commands.hardware_options import EXISTING, asked_for, machine_options
from pipeline.commands.options import Count, out_option, trust_options
from pipeline.errors import NoFit, UsageError, system_errors_as
from pipeline.utils.files import check_writable

if TYPE_CHECKING:
    from pipeline.planning.advise import AdviceRequest
    from pipeline.planning.hardware import HardwareOptions, Margins

COUNT = Count(min=1)


@click.command()
@click.argument("model")
@machine_options
@click.option(
    "--lora/--full",
    show_default="full",
    help="Train low-rank updates, or all weights.",
)
@click.option("--seq", type=COUNT, show_default="by the data, or 4096", help="Tokens in a sample.")
@click.option(
    "--global-batch",
    type=COUNT,
    show_default="by the data, or 64",
    help="Samples in a step, over all processes.",
)
@click.option(
    "--micro-batch",
    type=COUNT,
    show_default="8192 tokens",
    help="Largest number of samples in a forward pass.",
)
@click.option("--data", type=EXISTING, help="Conversations or texts to train on, as JSON lines.")
@click.option("--revision", show_default="main", help="Commit, branch or tag of a hub model.")
@click.option(
    "--attention",
    show_default="sdpa",
    help="Attention implementation, for a model that does not support sdpa.",
)
@out_option("Recipe to write.", default="MODEL.yaml")
@trust_options
@click.pass_obj
def advise(
    registry: Registry | None,
    /,
    model: str,
    lora: bool,
    seq: int | None,
    global_batch: int | None,
    micro_batch: int | None,
    data: Path | None,
    revision: str | None,
    attention: str | None,
    out: Path | None,
    **hardware: Any,
) -> None:
    """Find a strategy that trains MODEL on given GPUs, or on this machine's CPUs; write its recipe.

    MODEL is a folder, a hub id (ID or ID@REVISION), a GGUF file or a config.json. Tries savings
    that only cost time first, then savings that change the numbers (optimizer state, master weights
    or frozen weights in fewer bits), then offloading. Chooses one of the fastest strategies that
    fit and lists the others with their memory. With --data, the rows decide lengths, epochs, batch,
    evaluations and checkpoints. Exit code 3 if nothing fits."""
    machines, margins = asked_for(**hardware)
    require_whole(machines)
    Draft(
        model=model, revision=revision, attention=attention, data=data, lora=lora, sequence=seq,
        global_batch=global_batch, micro_batch=micro_batch, out=out, machines=machines,
        margins=margins, registry=registry or Registry.installed(),
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

    @property
    def where(self) -> dict[str, Any]:
        """Fields of the model slot. Raises UsageError."""
        more = {} if self.attention is None else {"attention": self.attention}
        return where(self.model, self.revision) | more

    def write(self) -> Path:
        """Look at the data, if there is any, write the recipe, say what was chosen and why, and
        return its place. Exits with code 3 where nothing fits. Raises PipeError."""
        from pipeline.distributed.signals import stoppable
        from pipeline.planning.advise import EXAMPLE, advise, look

        draft, place, target = self, self.where, self.target
        require_writable(target)
        example = target.with_suffix(".example.jsonl")
        with stoppable():
            if self.data is not None and self.survey is None:
                draft = replace(self, survey=look(place, self.data))
            task = draft.request(place, example)
            recipe, lines = advise(task, self.machines, self.margins, self.registry)
            if recipe is None and self.reason and not self.lora:
                draft = replace(draft, lora=True, reason="all weights do not fit")
                task = draft.request(place, example)
                recipe, lines = advise(task, self.machines, self.margins, self.registry)
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

    @property
    def target(self) -> Path:
        """The recipe."""
        return self.out or Path(f"{recipe_name(self.model)}.yaml")

    @property
    def name(self) -> str:
        """The recipe's name: of a file that was asked for, or the model's."""
        return recipe_name(
            self.out.stem if self.out else self.model, lora=self.lora and not self.out
        )

    def request(self, place: dict[str, Any], example: Path) -> AdviceRequest:
        """Return the request to the planner."""
        from pipeline.planning.advise import AdviceRequest
        from pipeline.planning.hardware import narrow_dtype

        machines = self.machines
        reasons = (f"{'LoRA' if self.lora else 'full'}: {self.reason}",) if self.reason else ()
        return AdviceRequest(
            name=self.name, model=place, data=self.data or example,
            lora=self.lora, sequence=self.sequence, global_batch=self.global_batch,
            micro_batch=self.micro_batch, ranks=machines.procs or 1, on_gpus=machines.on_gpus,
            # most CPUs only emulate narrow floats
            compute=narrow_dtype(machines) if machines.on_gpus else "fp32",
            survey=self.survey, folder=self.target.absolute().parent, reasons=reasons,
        )  # fmt: skip


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


def where(model: str, revision: str | None) -> dict[str, Any]:
    """Fields of the model slot: for a config, the folder of its weights, or the tokenizer next
    to it. Paths are absolute."""
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
    folder = path.parent
    if path.is_dir():
        # a GGUF file may be all that a folder has of a model
        found = [] if (path / "config.json").exists() else list(path.glob("*.gguf"))
        return {"path": str(found[0] if len(found) == 1 else path)}
    if path.suffix != ".json":
        return {"path": str(path)}
    if path.name == "config.json" and any(folder.glob("*.safetensors")):
        return {"path": str(folder)}
    return {"config": str(path)} | (
        {"tokenizer": str(folder)} if any(folder.glob("tokenizer*.json")) else {}
    )
