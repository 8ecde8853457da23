"""`pipe export`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.display import display_options
from pipeline.commands.trust import trust_options

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan, Started
    from pipeline.view.screen import Display


@click.command("export")
@click.argument("source", metavar="RUN|CHECKPOINT")
@click.option("--step", help="The step of a run's checkpoint, or `best` (default: newest).")
@click.option("--to", type=click.Path(path_type=Path), help="The folder to write.")
@click.option(
    "--model",
    help="Architecture and tokenizer, if not those of the checkpoint's run: a folder in Hugging "
    "Face layout, a GGUF file or a hub id (ID or ID@REVISION).",
)
@click.option("--dtype", help="fp32, bf16, fp16, or source (the dtypes of the model trained from).")
@click.option("--max-shard-size", help="Largest weight file, such as 5GB.")
@click.option("--procs", type=click.IntRange(min=1), help="Processes (default: up to 4).")
@click.option(
    "--accept",
    type=click.Choice(["weights"]),
    multiple=True,
    help="Export although the frozen weights of the model have changed since training.",
)
@display_options
@trust_options
def export(
    source: str,
    step: str | None,
    to: Path | None,
    model: str | None,
    dtype: str | None,
    max_shard_size: str | None,
    procs: int | None,
    accept: tuple[str, ...],
    display: Display,
) -> None:
    """Write the model of a RUN's checkpoint, or of any CHECKPOINT, as a verified export.

    Needs no GPU and little memory. CHECKPOINT can have been saved by this program, DeepSpeed,
    torch.distributed.checkpoint or transformers' Trainer. The same command again continues an
    interrupted export.
    """
    from pipeline.chain.plan import plan_file
    from pipeline.errors import UsageError, system_errors_as
    from pipeline.execution import rundir
    from pipeline.execution.export_recipe import chosen, recipe_text
    from pipeline.execution.rank_logging import say
    from pipeline.hardware.host import cores_each
    from pipeline.launch.start import Job, start
    from pipeline.utils.files import replace_text

    choose = functools.cache(lambda: chosen(source, step=step, model=model, to=to))

    @system_errors_as(UsageError)
    def plan(started: Started) -> Plan:
        choice = choose()
        settings: Mapping[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size}
        given = {key: value for key, value in settings.items() if value is not None}
        count = started.per_node or started.procs or procs or min(4, cores_each(1))
        choice.job.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Every stage runs again: the export itself finds out which of its files are finished.
        (choice.job / rundir.JOURNAL).unlink(missing_ok=True)
        file = choice.job / "export.yaml"
        replace_text(file, recipe_text(choice, given, count))
        made = plan_file(file, here=True, started=started)
        say(f"{choice.checkpoint} -> {choice.folder}")
        return made

    start(Job(plan=plan, folder=lambda _: choose().job, display=display, accept=accept))
