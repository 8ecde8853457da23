"""`pipe export`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.options import (
    FOLDER,
    Count,
    display_options,
    out_option,
    run_argument,
    trust_options,
)
from pipeline.errors import UsageError, system_errors_as
from pipeline.execution.rank_logging import say
from pipeline.utils.files import replace_text

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan
    from pipeline.distributed.launch import LaunchInfo
    from pipeline.view.display import Display


@click.command("export")
@run_argument("source", metavar="RUN|CHECKPOINT", address=True)
@click.option(
    "--step",
    metavar="N|best",
    show_default="newest",
    help="Checkpoint of RUN to export: its step, or the one with the lowest held-out loss.",
)
@out_option("Folder to write.", kind=FOLDER)
@click.option(
    "--model",
    help="Take architecture and tokenizer from this model, not from the checkpoint's run: a folder "
    "in Hugging Face layout, a GGUF file, or a hub id (ID or ID@REVISION).",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16", "source"]),
    help="Dtype of the weights; source keeps the base model's.",
)
@click.option("--max-shard-size", help="Size of the largest weight file, such as 5GB.")
@click.option("--procs", type=Count(min=1), show_default="up to 4", help="Number of processes.")
@click.option(
    "--accept",
    type=click.Choice(["weights"]),
    multiple=True,
    help="Export even if the frozen weights of the model have changed since training.",
)
@display_options
@trust_options
def export(
    source: str,
    step: str | None,
    out: Path | None,
    model: str | None,
    dtype: str | None,
    max_shard_size: str | None,
    procs: int | None,
    accept: tuple[str, ...],
    display: Display,
) -> None:
    """Export the model of RUN, or of any CHECKPOINT, and verify the export.

    RUN is by default the newest run in ./runs. CHECKPOINT may come from this program, DeepSpeed,
    torch.distributed.checkpoint or transformers' Trainer. Needs no GPU and little memory. Repeat
    the command to continue an interrupted export.
    """
    from pipeline.chain.plan import plan_file
    from pipeline.execution import rundir
    from pipeline.execution.export_recipe import chosen, recipe_text
    from pipeline.hardware.host import cores_each
    from pipeline.launch.job import Job
    from pipeline.launch.start import start

    choose = functools.cache(lambda: chosen(source, step=step, model=model, to=out))

    @system_errors_as(UsageError)
    def plan(started: LaunchInfo) -> Plan:
        choice = choose()
        settings: Mapping[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size}
        given = {key: value for key, value in settings.items() if value is not None}
        count = started.per_node or started.procs or procs or min(4, cores_each(1))
        choice.job.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Every stage runs again: the export itself finds out which of its files are finished.
        (choice.job / rundir.JOURNAL).unlink(missing_ok=True)
        file = choice.job / "export.yaml"
        replace_text(file, recipe_text(choice, given, count))
        made = plan_file(file, for_this_machine=True, started=started)
        say(f"{choice.checkpoint} -> {choice.folder}")
        return made

    start(Job(plan=plan, folder=lambda _: choose().job, display=display, accept=accept))
