"""Options that say what machines a recipe is meant for."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from pipeline.planning.hardware import Asked
    from pipeline.planning.margins import Margins

F = TypeVar("F", bound=Callable[..., Any])

MOST = 10**6
"""GiB, or GB/s, of anything in a machine."""

GPUS = click.IntRange(min=1, max=256)
"""Of a node."""
NODES = click.IntRange(min=1, max=100_000)


class Amount(click.FloatRange):
    """GiB or GB/s; not nan, which no comparison keeps out of a range."""

    name = "number"

    def __init__(self, least: float = 1e-3) -> None:
        super().__init__(min=least, max=MOST)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class Link(Amount):
    """The name of a link, or GB/s."""

    name = "rate"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        from pipeline.accelerators import GB, NETWORKS

        known = NETWORKS.get(str(value).lower())
        if known is not None:
            return known / GB
        try:
            float(value)
        except ValueError:
            names = ", ".join(NETWORKS)
            self.fail(f"{value!r} is neither a number of GB/s nor one of {names}.", param, ctx)
        return super().convert(value, param, ctx)


OPTIONS = (
    click.option("--gpu", help="Kind of GPU, as in H100, or 'A100 40GB'."),
    click.option("--memory", type=Amount(), help="GiB of a GPU, in place of what its kind has."),
    click.option("--host-memory", type=Amount(), help="GiB of host memory of a node."),
    click.option(
        "--interconnect", type=Link(), help="Between nodes: 100gbe, 400g, ..., or GB/s of a node."
    ),
    click.option("--nvme", type=Amount(), help="GB/s of the disk that state is offloaded to."),
    click.option(
        "--overhead",
        type=Amount(least=0),
        help="GiB that a GPU loses beside tensors, in place of 1.5.",
    ),
    click.option(
        "--machine",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="A machine like those, as `pipe doctor --out` has measured it.",
    ),
)


def machine_options(command: F) -> F:
    """A command with these options; `asked_for` takes what they say."""
    return reduce(lambda made, option: option(made), reversed(OPTIONS), command)


def asked_for(
    gpus: int | None,
    nodes: int | None,
    *,
    gpu: str | None,
    memory: float | None,
    host_memory: float | None,
    interconnect: float | None,
    nvme: float | None,
    overhead: float | None,
    machine: Path | None,
) -> tuple[Asked, Margins]:
    """The machines, and what their GPUs lose beside tensors. Raises UsageError for a file that
    describes no machine."""
    from pipeline.accelerators import GIB
    from pipeline.doctor.report import read_machine
    from pipeline.planning.hardware import Asked
    from pipeline.planning.hardware_spec import OVERHEAD
    from pipeline.planning.margins import Margins

    asked = Asked(
        gpus=gpus, nodes=nodes, gpu=gpu, memory=memory, host_memory=host_memory,
        interconnect=interconnect, disk=nvme,
        machine=None if machine is None else read_machine(machine),
    )  # fmt: skip
    return asked, Margins(overhead=OVERHEAD if overhead is None else round(overhead * GIB))
