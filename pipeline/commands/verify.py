"""`pipe verify`."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.options import code_option, run_argument
from pipeline.errors import ExportError, UsageError, system_errors_as
from pipeline.utils.foreign import json_object


@click.command("verify")
@run_argument("folder", metavar="RUN|EXPORT")
@code_option
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
        raise UsageError(
            f"{wrote} is not installed", hint="install its package into this environment"
        )
    stage = registry.load(name)
    if not issubclass(gives(stage) or object, ExportedModel) or not hasattr(stage, "verify"):
        raise UsageError(f"{wrote} cannot verify it", hint=f"its class lacks `{VERIFY}`")
    with system_errors_as(ExportError):
        stage.verify(folder, click.echo, trust_remote_code=trusted(TRUST_CODE))
