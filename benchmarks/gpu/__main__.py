"""Measure training on one GPU: `python benchmarks/gpu --out FOLDER`.

Made for ten minutes on one GPU, from a plain checkout, without a network. Writes `results.json`
after each setting, and `results.md` from it, so a program that is cut short keeps what it has.
Settings come in the order of their weight; `--only` chooses. `--tiny` runs everything on a
processor with tiny shapes: numbers mean nothing then.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from gpu import checkout
from gpu.settings import SETTINGS, Setting, tiny

ROOM = 40 << 30
"""Bytes of memory's file system that the models need, to lie there."""
MEMORY = Path("/dev/shm")


def chosen(only: Sequence[str]) -> Iterator[Setting]:
    """Yield the settings with one of some names, or all."""
    for setting in SETTINGS:
        if not only or setting.name in only:
            yield setting


@click.command(help=__doc__)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder of the results."
)
@click.option("--minutes", type=float, default=9.5, show_default=True, help="Time limit.")
@click.option("--only", multiple=True, help="Name of a setting; can be given again.")
@click.option("--tests/--no-tests", default=True, help="Run tests/gpu first.")
@click.option(
    "--ahead/--no-ahead", default=True, help="Compile for all settings at once, before the first."
)
@click.option("--tiny", "small", is_flag=True, help="Tiny shapes on a processor.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder of models and runs.")
def main(
    out: Path,
    minutes: float,
    only: Sequence[str],
    tests: bool,
    ahead: bool,
    small: bool,
    work: Path | None,
) -> None:
    deadline = time.monotonic() + 60 * minutes
    unknown = set(only) - {setting.name for setting in SETTINGS}
    if unknown:
        names = ", ".join(setting.name for setting in SETTINGS)
        raise click.UsageError(f"no setting {sorted(unknown)[0]!r}; there are: {names}")
    settings = [tiny(one) if small else one for one in chosen(only)]
    out.mkdir(parents=True, exist_ok=True)
    place = MEMORY if work is None and _room(MEMORY) else work
    with tempfile.TemporaryDirectory(dir=place) as folder:
        checkout.declare(Path(folder) / "entry_points")
        from gpu.measurement import Measurement

        measurement = Measurement(
            out=out, work=Path(folder), deadline=deadline, small=small, ahead=ahead
        )
        measurement.run(settings, tests=tests)
    click.echo((out / "results.md").read_text("utf-8"))


def _room(folder: Path) -> bool:
    return folder.is_dir() and shutil.disk_usage(folder).free > ROOM


if __name__ == "__main__":
    main()
