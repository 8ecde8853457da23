"""`pipe convert`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import Count, trust_options
from pipeline.errors import StageError, UsageError, system_errors_as
from pipeline.utils.activities import BYTES, activity
from pipeline.utils.text import human, plural

if TYPE_CHECKING:
    from pipeline.checkpoint.formats import StateSource


@click.command("convert")
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "to",
    required=True,
    metavar="FORMAT",
    help="Format of DST: canonical, full, deepspeed, dcp.",
)
@click.option(
    "--from", "from_", metavar="FORMAT", help="Format of SRC, if its files do not show it."
)
@click.option(
    "--samples",
    type=Count(min=0),
    default=0,
    show_default=True,
    help="Number of samples trained on, for formats that do not record it.",
)
@click.option("--weights-only", is_flag=True, help="Leave out the optimizer state.")
@trust_options
def convert(
    src: Path, dst: Path, to: str, from_: str | None, samples: int, weights_only: bool
) -> None:
    """Convert the training state in SRC to another format, in the folder DST.

    SRC is the folder of one checkpoint of this program, DeepSpeed, torch.distributed.checkpoint
    (torchtitan, accelerate) or transformers' Trainer. Runs in one process, with one chunk or
    tensor in memory at a time. Pickles are refused unless --trust-pickle is given.
    """
    from pipeline.checkpoint.formats import Formats, Reading, StateView

    for path in (src, dst):
        if ":/" in str(path):
            raise UsageError(f"{path}: only folders can be converted, no addresses")
    formats = Formats.installed()
    writing = formats.get(to)
    reading = formats.get(from_) if from_ else formats.detect(src)
    with system_errors_as(StageError):
        source = reading.open(src, Reading(samples=samples, weights_only=weights_only))
        with contextlib.closing(source):
            if weights_only:
                source = StateView(source, weights_only=True)
            target = writing.target(dst, source.step)
            if target.exists():
                raise UsageError(f"{target} is there already", hint="give another folder")
            _announce(source, reading.name)
            with activity(f"converting to {writing.name}", source.nbytes, BYTES) as converting:
                notes = writing.write(StateView(source, converting.advance), target)
    click.echo(f"wrote {target}")
    for note in notes:
        click.echo(f"note: {note}", err=True)


def _announce(source: StateSource, name: str) -> None:
    from pipeline.contracts.training import Progress

    tensors, size = plural(len(source.tensors), "tensor"), human(source.nbytes)
    click.echo(f"{source.where}: {name}, step {source.step}, {tensors}, {size}")
    if not Progress.from_record(source.progress).lineage:
        click.echo(
            "warning: it does not say on which model and data it was trained, so nothing will be "
            f"compared; samples={source.progress.get('samples', 0)} is assumed (--samples)",
            err=True,
        )
