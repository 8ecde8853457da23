"""Options that say what machines a recipe is meant for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.commands.options import Count

if TYPE_CHECKING:
    from pipeline.planning.hardware import HardwareOptions, Margins

F = TypeVar("F", bound=Callable[..., Any])


class GpuCount(Count):
    """A number of GPUs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.lstrip("-").isdecimal():
            self.fail(f"{value} is not a number of GPUs; --gpu {value} is their kind.", param, ctx)
        return super().convert(value, param, ctx)


GPUS = GpuCount(min=1, max=256)
"""GPUs of a node."""
MOST = 10**6
"""GiB, or GB/s, of anything in a machine."""
EXISTING = click.Path(path_type=Path, dir_okay=False, exists=True)
RUN = click.Path(path_type=Path, exists=True)


def amount(given: str, least: float = 1e-3) -> float:
    """GiB or GB/s; not nan, which no comparison keeps out of a range."""
    number = float(click.FloatRange(min=least, max=MOST).convert(given, None, None))  # type: ignore[arg-type]
    if math.isnan(number):
        raise click.BadParameter(f"{given!r} is not a number.")
    return number


def spare(given: str) -> float:
    """GiB, possibly none."""
    return amount(given, 0)


def link(given: str) -> float:
    """GB/s of a link by its name, of several as in `8x400g`, or as a number."""
    from pipeline.hardware.gpus import GB, NETWORKS

    cards = re.fullmatch(r"(?:([1-9][0-9]?)x)?([0-9]+g(?:be)?)", given.lower())
    if cards is not None and cards[2] in NETWORKS:
        return int(cards[1] or 1) * NETWORKS[cards[2]] / GB
    try:
        float(given)
    except ValueError:
        names = f"nor one of {', '.join(NETWORKS)}, nor several of them as in 8x400g"
        raise click.BadParameter(f"{given!r} is neither a number of GB/s {names}.") from None
    return amount(given)


OPTIONS = {
    "--gpus": (GPUS, "GPUs in a node."),
    "--nodes": (Count(min=1, max=100_000), "Nodes, of 8 GPUs each without --gpus."),
    "--gpu": (str, "Kind of GPU, such as H100 or 'A100 40GB'."),
    "--memory": (amount, "Memory of a GPU in GiB, if not as usual for its kind."),
    "--host-memory": (amount, "Host memory of a node in GiB."),
    "--interconnect": (link, "Network of a node: 100gbe, 8x400g, ..., or GB/s."),
    "--nvme": (amount, "GB/s of the disk for offloaded state."),
    "--overhead": (spare, "GiB of a GPU in use outside torch, if not the measured value."),
    "--measured": (RUN, "Run that measured memory outside tensors on this kind of GPU, "
                   "if not the newest one in ./runs."),
    "--price": (amount, "Price of a GPU hour, to predict the cost."),
    "--machine": (EXISTING, "Report of `pipe doctor --out` on such a machine."),
}  # fmt: skip
"""Option -> its type, and help."""


def machine_options(command: F) -> F:
    """A command with these options, whose values `asked_for` takes."""
    options = [click.option(name, type=kind, help=text) for name, (kind, text) in OPTIONS.items()]
    return reduce(lambda made, option: option(made), reversed(options), command)


def asked_for(
    *, nvme: float | None, overhead: float | None, measured: Path | None, machine: Path | None,
    **given: Any,
) -> tuple[HardwareOptions, Margins]:  # fmt: skip
    """The machines, and the margins of their GPUs. Raises UsageError for a file that describes no
    machine, or no run's memory."""
    from pipeline.planning.hardware import HardwareOptions, margins_for

    found = None
    if machine is not None:
        from pipeline.doctor.report import read_machine

        found = read_machine(machine)
    machines = HardwareOptions(disk=nvme, machine=found, **given)
    return machines, margins_for(machines.kind, record=measured, overhead=overhead)
