"""Options that say what machines a recipe is meant for."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from pipeline.forecast.fit import Margins
    from pipeline.forecast.hardware import Asked

F = TypeVar("F", bound=Callable[..., Any])

SIZE = click.FloatRange(min=0, min_open=True)

OPTIONS = (
    click.option("--gpu", help="Kind of GPU, as in H100, or 'A100 40GB'."),
    click.option("--memory", type=SIZE, help="GiB of a GPU, in place of what its kind has."),
    click.option("--host-memory", type=SIZE, help="GiB of host memory of a node."),
    click.option("--interconnect", help="Between nodes: 100gbe, 400g, ..., or GB/s of a node."),
    click.option("--nvme", type=SIZE, help="GB/s of the disk that state is offloaded to."),
    click.option(
        "--overhead",
        type=click.FloatRange(min=0),
        help="GiB that a GPU loses beside tensors, in place of 1.5.",
    ),
    click.option(
        "--machine",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Rates of a machine, as `pipe doctor --out` has measured them.",
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
    interconnect: str | None,
    nvme: float | None,
    overhead: float | None,
    machine: Path | None,
) -> tuple[Asked, Margins]:
    """The machines, and what their GPUs lose beside tensors."""
    from pipeline.accelerators import GIB
    from pipeline.forecast.fit import Margins
    from pipeline.forecast.hardware import Asked
    from pipeline.forecast.site import OVERHEAD

    asked = Asked(
        gpus=gpus, nodes=nodes, gpu=gpu, memory=memory, host_memory=host_memory,
        interconnect=interconnect, disk=nvme, machine=machine,
    )  # fmt: skip
    return asked, Margins(overhead=OVERHEAD if overhead is None else round(overhead * GIB))
