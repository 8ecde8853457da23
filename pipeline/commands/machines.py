"""Options that say what machines a recipe is meant for."""

from __future__ import annotations

import math
import re
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
    """The name of a link, a number of them as in `8x400g`, or GB/s."""

    name = "rate"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        from pipeline.accelerators import GB, NETWORKS

        cards = re.fullmatch(r"(?:([1-9][0-9]?)x)?([0-9]+g(?:be)?)", str(value).lower())
        if cards is not None and cards[2] in NETWORKS:
            return int(cards[1] or 1) * NETWORKS[cards[2]] / GB
        try:
            float(value)
        except ValueError:
            names = ", ".join(NETWORKS)
            self.fail(
                f"{value!r} is neither a number of GB/s nor one of {names}, nor several of them as "
                "in 8x400g.",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


OPTIONS = (
    click.option("--gpu", help="Kind of GPU, as in H100, or 'A100 40GB'."),
    click.option("--memory", type=Amount(), help="GiB of a GPU, in place of what its kind has."),
    click.option("--host-memory", type=Amount(), help="GiB of host memory of a node."),
    click.option(
        "--interconnect",
        type=Link(),
        help="A node's links to others: 100gbe, 8x400g, ..., or their GB/s together.",
    ),
    click.option("--nvme", type=Amount(), help="GB/s of the disk that state is offloaded to."),
    click.option(
        "--overhead",
        type=Amount(least=0),
        help="GiB of a GPU in use beside tensors' allocator, in place of what is known of it.",
    ),
    click.option(
        "--measured",
        type=click.Path(path_type=Path, exists=True),
        help="A run on GPUs of the same kind: what they lost beside tensors is taken from it. "
        "Default: the newest one in ./runs.",
    ),
    click.option("--price", type=Amount(), help="Of a GPU for an hour: tells a training's cost."),
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
    measured: Path | None,
    price: float | None,
    machine: Path | None,
) -> tuple[Asked, Margins]:
    """The machines, and what their GPUs lose beside tensors. Raises UsageError for a file that
    describes no machine, or no run's memory."""
    from pipeline.doctor.report import read_machine
    from pipeline.planning.hardware import Asked
    from pipeline.planning.margins import margins_for

    asked = Asked(
        gpus=gpus, nodes=nodes, gpu=gpu, memory=memory, host_memory=host_memory,
        interconnect=interconnect, disk=nvme, price=price,
        machine=None if machine is None else read_machine(machine),
    )  # fmt: skip
    return asked, margins_for(asked.kind, record=measured, overhead=overhead)
