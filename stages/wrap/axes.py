"""Axes of parallelism next to the data-parallel one: fields of stages, and the layout of ranks.

Outermost first, the axes are pipeline, data, context, tensor. Ranks of a tensor-parallel group are
neighbours, since they exchange activations in every layer; a context-parallel group exchanges them
in every attention.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from annotated_types import Ge

from pipeline import DataAxis, StageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from pipeline import Context

Size = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Divide the tokens of every sample among ranks, for long sequences.

    Each rank runs the model on a slice of the sequence. Around attention, ranks exchange heads for
    the rest of the sequence, so that each attends over all of it with a share of the heads
    (Jacobs et al. 2023, DeepSpeed Ulysses). Activations, logits and the loss's memory are divided.
    """

    size: Size
    """Ranks that share a sample. It divides the number of attention heads."""


Style = Literal[
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "packed_colwise",
    "packed_rowwise",
    "embedding_rowwise",
    "moe_tp_experts",
    "mla_kv_a_proj",
    "replicated_with_grad_allreduce",
    "local_params",
    "replicate",
]
"""How a layer is divided, as transformers names it in the plans of its architectures."""


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Divide the matrices of every layer among ranks (Shoeybi et al. 2019, Megatron-LM).

    The ranks of a group are neighbours and belong on one node: they exchange activations in every
    layer. The vocabulary is divided too, in the embedding, the head and the loss.
    """

    size: Size
    """Ranks that share a layer. It divides attention heads and the layers' widths; of key and value
    heads there may be fewer."""

    sequence: bool = True
    """Divide activations between the layers along the sequence (Korthikanti et al. 2022): norms and
    residuals take 1/size of the memory, for the same traffic. Samples are padded to a multiple of
    `size` tokens."""

    plan: Mapping[str, Style] = field(default_factory=dict)
    """Layers and how they are divided, where the architecture does not say so or says otherwise:
    `model.layers.*.mlp.up_proj: colwise`. `*` stands for one part of a name."""


Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"
]
SEVERAL_STAGES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules under which a rank has two or more stages."""
FOLDED = ("ZBVZeroBubble",)
"""Schedules whose first and last stage are on one rank."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that compute gradients of inputs first, and of weights later."""


@dataclass(frozen=True, kw_only=True)
class PipelineParallel:
    """Give each rank consecutive blocks of the model; micro-batches pass from rank to rank.

    Little is communicated, so the ranks of a pipeline may be on several nodes. All of a step's
    micro-batches are padded to one shape.
    """

    size: Size
    """Ranks of a pipeline."""

    schedule: Schedule = "1F1B"
    """Order of forward and backward passes, as torch names it: GPipe (Huang et al. 2019), 1F1B and
    Interleaved1F1B (Narayanan et al. 2021), LoopedBFS (Lamy-Poirier 2023), InterleavedZeroBubble
    and ZBVZeroBubble (Qi et al. 2024). A step of few micro-batches leaves ranks idle."""

    stages_per_rank: Annotated[int, Ge(2)] | None = None
    """Parts of the model on each rank, for schedules that interleave them; null means 2 there."""

    @property
    def per_rank(self) -> int:
        """Parts of the model on each rank."""
        return (self.stages_per_rank or 2) if self.schedule in SEVERAL_STAGES else 1


@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """Give each rank some of the experts of every layer; tokens go to the ranks of their experts
    and back (all-to-all; Lepikhin et al. 2021, GShard). The ranks are data-parallel otherwise."""

    size: Size
    """Ranks that share a layer's experts. It divides the ranks that share the other parameters."""


def caveats(stage: Any) -> tuple[str, ...]:
    """Effects of a stage's axes that a plan of its time leaves out."""
    found = []
    if getattr(stage, "context_parallel", None) is not None:
        found.append(
            "waiting for attention's exchanges: trainings with context parallelism that others "
            "published took 1.3 to 2 times as long as is expected of them"
        )
    pipeline = getattr(stage, "pipeline_parallel", None)
    if pipeline is not None and pipeline.per_rank > 1:
        found.append(
            f"what each pass of {pipeline.schedule} costs next to its arithmetic: where others "
            "measured both, 1F1B was as fast or faster"
        )
    return tuple(found)


FIELDS = {
    "pipeline": "pipeline_parallel",
    "context": "context_parallel",
    "tensor": "tensor_parallel",
}
"""Axis -> the field that asks for it."""


def axis_sizes(stage: Any) -> dict[str, int]:
    """Sizes of the axes that a stage has fields for."""
    blocks = {axis: getattr(stage, name, None) for axis, name in FIELDS.items()}
    return {axis: block.size for axis, block in blocks.items() if block is not None}


class Coordinates(NamedTuple):
    """Coordinates of a rank on the axes."""

    pipeline: int
    data: DataAxis
    context: int
    tensor: int
    stream: int
    """Number of the rank's stream of random numbers. Ranks of a tensor-parallel group share one,
    since what they all compute must be the same."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Number of ranks on each axis; they multiply to all ranks."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the axes on which ranks run one model together."""
        found = {"pipeline": self.pipeline, "context": self.context, "tensor": self.tensor}
        return {axis: size for axis, size in found.items() if size > 1}

    def coordinates(self, rank: int) -> Coordinates:
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        of_data = DataAxis(index=data, count=self.data)
        return Coordinates(pipeline, of_data, context, tensor, rank // self.tensor)


def required(stage: Any, procs: int) -> Axes:
    """The axes that a wrap stage asks for, all that is left being data-parallel. Raises StageError
    if the processes do not divide."""
    sizes = axis_sizes(stage)
    data, rest = divmod(procs, math.prod(sizes.values()))
    if rest:
        listed = ", ".join(f"{FIELDS[axis]} {size}" for axis, size in sizes.items())
        raise StageError(f"{procs} processes do not divide into groups ({listed})")
    return Axes(data=data, **sizes)


class OnAxes:
    """A wrap stage with fields of axes; see `pipeline.DividesRanks`."""

    def data_ranks(self, procs: int) -> int:
        data, rest = divmod(procs, math.prod(axis_sizes(self).values()))
        return 0 if rest else data


def least_microbatches(schedule: str, ranks: int, count: int) -> int:
    """The number of micro-batches from `count` on that a schedule of torch can run."""
    if schedule == "1F1B":
        return max(count, ranks)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):  # rounds of equal numbers
        while count % max(1, count // ranks):
            count += 1
    return count


def parameter_mesh(axes: Axes, device: str, shards: int, experts: int = 1) -> DeviceMesh:
    """The mesh over which parameters are cut: `pipeline`, `replicate`, `shard`, `tensor`
    (collective). Each tensor-parallel part is cut again into `shards`, over the data and context
    axes together. With `experts`, the mesh over which experts are cut: after `shard` it has an axis
    `expert` of so many ranks, which are neighbours among the `shards`."""
    sizes = {"pipeline": axes.pipeline, "replicate": axes.data * axes.context // shards}
    sizes |= {"shard": shards // experts} | ({"expert": experts} if experts > 1 else {})
    return mesh_of(device, sizes | {"tensor": axes.tensor})


_meshes: WeakKeyDictionary[ProcessGroup, dict[Hashable, DeviceMesh]] = WeakKeyDictionary()


def mesh_of(device: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all ranks with axes of these sizes (collective). Engines of a process share it:
    process groups stay until the process ends."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from pipeline.utils import with_values

    assert dist.group.WORLD is not None
    made = _meshes.setdefault(dist.group.WORLD, {})
    if (key := (device, *sizes.items())) not in made:
        with with_values():
            made[key] = init_device_mesh(device, (*sizes.values(),), mesh_dim_names=(*sizes,))
    return made[key]


def warn_of_slow_groups(ctx: Context, axes: Axes) -> None:
    """Log a warning if tensor-parallel groups reach over nodes."""
    here = ctx.dist.local_world_size
    if axes.tensor > 1 and here % axes.tensor and ctx.dist.world_size > here:
        ctx.log.warning(
            "tensor_parallel: groups of %d ranks reach over nodes of %d, and exchange activations "
            "in every layer",
            axes.tensor, here,
        )  # fmt: skip


def layer_ranges(layers: int, stages: int, head: int = 0, layer: int = 1) -> list[range]:
    """Consecutive layers of each stage, such that the busiest stage has as little work as possible:
    `head` and `layer` are elements of the matrices of the head, which the last stage has, and of a
    layer. Left-over layers go to middle stages first, since the first also has the embedding.
    Raises StageError for more stages than layers."""
    if stages > layers:
        raise StageError(f"pipeline_parallel: {layers} blocks do not make {stages} stages")
    sizes, last = [1] * stages, stages - 1
    for _ in range(layers - stages):
        work = [
            (size * layer + head * (n == last), n == 0, n == last) for n, size in enumerate(sizes)
        ]
        sizes[work.index(min(work))] += 1
    starts = itertools.accumulate(sizes, initial=0)
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def stages_of(rank: int, ranks: int, per_rank: int, *, folded: bool) -> list[int]:
    """Numbers of a rank's stages, of `ranks` times `per_rank`: every `ranks`-th one; `folded`, the
    second round goes back from the last rank to the first."""
    places = (ranks - 1 - rank if folded and turn % 2 else rank for turn in range(per_rank))
    return [turn * ranks + place for turn, place in enumerate(places)]
