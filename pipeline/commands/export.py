"""`pipe export` and `pipe verify`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands import options
from pipeline.commands.options import FOLDER, Count, option
from pipeline.errors import ExportError, UsageError, system_errors_as
from pipeline.execution.rank_logging import say
from pipeline.utils.files import replace_text
from pipeline.utils.foreign import json_object

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan
    from pipeline.distributed.settings import ProcessCounts
    from pipeline.view.display import Display


@click.command("export")
@options.run("source", metavar="RUN|CHECKPOINT", address=True)
@option("--step",
        "Checkpoint of RUN to export: its step, or the one with the lowest held-out loss.",
        metavar="N|best", show_default="newest")  # fmt: skip
@options.out("Folder to write.", kind=FOLDER)
@option(
    "--model",
    "Take architecture and tokenizer from this model, not from the checkpoint's run: a folder "
    "in Hugging Face layout, a GGUF file, or a hub id (ID or ID@REVISION).",
)
@option("--dtype", "Dtype of the weights; source keeps the base model's.",
        type=click.Choice(["fp32", "bf16", "fp16", "source"]))  # fmt: skip
@option("--max-shard-size", "Size of the largest weight file, such as 5GB.")
@option("--procs", "Number of processes.", type=Count(min=1), show_default="up to 4")
@option("--accept", "Export even if the frozen weights of the model have changed since training.",
        type=click.Choice(["weights"]), multiple=True)  # fmt: skip
@options.display
@options.trust
def export(
    source: str, step: str | None, out: Path | None, model: str | None, procs: int | None,
    accept: tuple[str, ...], display: Display, **settings: Any,
) -> None:  # fmt: skip
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
    def plan(started: ProcessCounts) -> Plan:
        choice = choose()
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


@click.command("verify")
@options.run("folder", metavar="RUN|EXPORT")
@options.trust_code
def verify(folder: Path) -> None:
    """Verify EXPORT, or the exports of RUN: nothing is damaged and the model computes the same.

    RUN is by default the newest run in ./runs. Reads and compares every byte, then loads the model
    with transformers and runs it on the prompt of its export. Exit code 1 if anything differs.
    """
    from pipeline.execution import rundir
    from pipeline.execution.export_recipe import exports_of

    folder = folder.resolve()
    is_run = (folder / rundir.RECIPE).is_file()
    for export in exports_of(folder) if is_run else [folder]:
        if not export.is_dir():
            raise UsageError(f"{export} is not there", hint="`pipe resume RUN` finishes a run")
        # the hub's cache holds links to files elsewhere; a run writes none
        _verify(export, export if is_run else None)
    click.echo("verified")


def _verify(folder: Path, within: Path | None) -> None:
    """Have the stage that wrote an export, by its manifest, verify it."""
    from pipeline.chain.registry import Registry
    from pipeline.contracts.export import EXPORT_MANIFEST, VERIFY, ExportedModel
    from pipeline.contracts.signature import gives
    from pipeline.utils.foreign import TRUST_CODE, trusted

    name = json_object(folder / EXPORT_MANIFEST, most=1 << 28, within=within).get("writer")
    if not isinstance(name, str):
        raise UsageError(
            f"{folder} is not an export of ours: it has no {EXPORT_MANIFEST} with its writer",
            hint="give a folder that `pipe export` or a run has written",
        )
    registry = Registry.installed()
    wrote = f"the stage {name}, which wrote {folder},"
    if name not in registry:
        hint = "install its package into this environment"
        raise UsageError(f"{wrote} is not installed", hint=hint)
    stage = registry.load(name)
    if not issubclass(gives(stage) or object, ExportedModel) or not hasattr(stage, "verify"):
        raise UsageError(f"{wrote} cannot verify it", hint=f"its class lacks `{VERIFY}`")
    with system_errors_as(ExportError):
        stage.verify(folder, click.echo, trust_remote_code=trusted(TRUST_CODE))
