"""Divide a model's layers among tensor-parallel ranks, by a plan (`tensor_plan.py`).

Weights are DTensors, for sharding and saving; layers compute with their local tensors, and say
themselves what is communicated. Forward methods are replaced, not modules: names stay, hooks of a
strategy stay outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pipeline.utils import local_part, own_chunk
from stages.collectives import (
    SEQUENCE,
    all_reduce,
    gather,
    reduce_scatter,
    split,
    sum_gradients,
)
from stages.wrap.axes import TensorParallel
from stages.wrap.build import replace_parameters
from stages.wrap.tensor_plan import (
    COLUMNS,
    ROWS,
    Region,
    TensorPlan,
    innermost,
    layer_sizes,
    region_of,
)
from stages.wrap.torch_compat import split_of

Forward = Callable[..., Any]
Change = Callable[[Tensor], Tensor]
Values = Mapping[nn.Module, Mapping[str, Callable[[], Tensor]]]
"""Module -> name of a direct parameter -> function that returns the local tensor to use."""


def divide_layers(
    config: TensorParallel, model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh,
    compiled: Sequence[nn.Module] = (), *, late: bool = False,
) -> None:  # fmt: skip
    """Divide a model on the meta device over the one axis of `mesh`, in place. `compiled` modules
    have compiled forward methods; `late` parameters are there only while their own modules run.
    Raises StageError for a model that does not divide so.

    Every parameter becomes a DTensor on `mesh`, tied ones stay one object. The forward takes the
    same tokens on every rank, and returns logits that are a DTensor sharded by the vocabulary if
    the plan divides the output layer, else complete. With `sequence` the length has to divide among
    the ranks. Every rank computes the same loss; gradients are parts where weights are divided,
    complete and equal on all ranks where they are not."""
    plan = TensorPlan(config, model, blocks)
    if mesh.size() != plan.size:
        raise ValueError(f"a plan for {plan.size} ranks on a mesh of {mesh.size()}")

    def part(name: str, whole: nn.Parameter) -> Tensor:
        placement, own = plan.placements[name], [*whole.shape]
        if (parts := split_of(placement)) is not None:  # by the rule of torch.chunk
            own[placement.dim] = len(own_chunk(own[placement.dim] // parts, mesh)) * parts
        return DTensor.from_local(
            torch.empty(own, dtype=whole.dtype, device="meta"),
            mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride(),
        )  # fmt: skip

    replace_parameters(model, part)
    _Installer(model, mesh, plan, compiled, late=late).install()


class _Installer:
    """Replaces forward methods, from the innermost change to the outermost."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, plan: TensorPlan, compiled: Sequence[nn.Module],
        *, late: bool,
    ) -> None:  # fmt: skip
        self.model, self.mesh, self.plan = model, mesh, plan
        self.compiled, self.late = compiled, late
        self.group = mesh.get_group()
        self.summed: Change = functools.partial(sum_gradients, group=self.group)
        self.streams = Streams(mesh.get_local_rank(), mesh.size())
        self.modules = dict(model.named_modules())
        self.places = {name: place for place, name in enumerate(self.modules)}
        """Number of each module, by which dropout draws."""
        self.values = {one: self._values(name, one) for name, one in self.modules.items()}

    def install(self) -> None:
        plan, group = self.plan, self.group
        # torch 2.13 fails to compile what is recomputed if it begins with DTensors, whose mesh it
        # takes for one of the tensors that it keeps for backward.
        ahead = {inner for block in self.compiled for inner in block.modules()}
        for one in self.modules.values():
            if self.values[one] and one not in ahead:
                use_local_values(one, self.values, inside=[one])
        for name, style in plan.styles.items():
            if name in self.modules:
                self._install_style(name, self.modules[name], style)
        for region in plan.regions:
            # A module may read weights of others that it does not call.
            if not self.late and self.modules[region.block] not in self.compiled:
                use_local_values(self.modules[region.name], self.values)
            self._install_region(region, self.modules[region.name])
        blocks = [self.modules[name] for name in plan.blocks]
        for block in blocks:
            if plan.sequence and has_dropout(block):
                draw_within(block, self.streams)
        for block in self.compiled:
            use_local_values(block, self.values)
        if plan.sequence:
            change(blocks[0], before=lambda value: split(value, group, SEQUENCE))
            complete = functools.partial(gather, group=group, dim=SEQUENCE, summands=False)
            change(blocks[-1], after=complete)

    def _values(self, name: str, module: nn.Module) -> dict[str, Callable[[], Tensor]]:
        """Functions that return this rank's part of each of a module's own parameters."""
        entry, found = innermost(name, self.plan.styles), dict[str, Callable[[], Tensor]]()
        rank, size = self.mesh.get_local_rank(), self.plan.size
        heads = self.plan.shared_heads.get(entry, 1)
        if entry in self.plan.shared_heads:
            attention: Any = self.modules[entry.rpartition(".")[0]]
            if not getattr(attention, "keys_are_shared", False):
                attention.num_key_value_groups = attention.num_key_value_groups * heads // size
                attention.keys_are_shared = True
        # Rows of the one head that this rank's queries attend to.
        head = (1, 0) if ".lora_A." in f"{name}." else (heads, rank * heads // size)
        for leaf in (leaf for leaf, one in module._parameters.items() if one is not None):
            group = self.group if f"{name}.{leaf}".removeprefix(".") in self.plan.summed else None
            # Outputs of row layers are summed over ranks, so one adds the bias.
            once = leaf == "bias" and self.plan.styles.get(entry) in ROWS
            factor = 0.0 if once and rank > 0 else 1.0
            found[leaf] = functools.partial(local_value, module, leaf, group, head, factor)
        return found

    def _install_style(self, name: str, module: nn.Module, style: str) -> None:
        group, config = self.group, cast("Any", self.model.config)
        if name == self.plan.head:
            sizes = layer_sizes(module)
            assert sizes is not None
            whole = functools.partial(whole_logits, mesh=self.mesh, vocabulary=sizes[1])
            change(module, before=self.summed, after=whole)
        elif style in COLUMNS:
            self._install_columns(name, module, region_of(name, self.plan.regions))
        elif style in ROWS:
            self._install_rows(name, module, region_of(name, self.plan.regions))
        elif style == "embedding_rowwise":
            install_embedding(module, self.mesh)
        elif style == "moe_tp_experts":
            replace_forward(module, functools.partial(divided_experts, group=group))
        elif style == "mla_kv_a_proj":
            rope = config.get_text_config().qk_rope_head_dim
            change(module, after=functools.partial(latent_states, group=group, rope=rope))

    def _install_columns(self, name: str, module: nn.Module, region: Region | None) -> None:
        """A linear layer computes this rank's part of the outputs, from complete inputs."""
        one: Any
        for one in module.modules():
            if hasattr(one, "nf"):  # GPT-2's layers give their output this width
                one.nf //= self.plan.size
        plain, complete = region is not None and region.plain, None
        if self.plan.styles[name].endswith(("gather_output", "rep")):
            complete = functools.partial(gather, group=self.group, dim=-1, summands=False)
        change(module, before=None if plain else self.summed, after=complete)
        if has_dropout(module) and self._draws_own(region):
            # Dropout of an update's inputs, which are complete.
            draw_within(module, self.streams, self.places[name])

    def _install_rows(self, name: str, module: nn.Module, region: Region | None) -> None:
        """A linear layer takes this rank's part of the inputs; its outputs are summed over ranks,
        to be complete or sharded along the sequence."""
        scatters = self.plan.sequence and region is not None and region.plain
        splits = self.plan.styles[name].endswith(("split_input", "rep"))
        own = functools.partial(split, group=self.group, dim=-1) if splits else None
        reduce = functools.partial(reduce_scatter, dim=SEQUENCE) if scatters else all_reduce
        change(module, before=own, after=functools.partial(reduce, group=self.group))
        if splits and has_dropout(module) and not (region and region.divides):
            # Dropout of an update's inputs: each rank has a slice.
            draw_within(module, self.streams)
        if self._draws_own(region):
            self._switch_after(module, self.places[name], shared=not scatters)

    def _draws_own(self, region: Region | None) -> bool:
        """Whether the region is run inside of a stream that only this rank draws from."""
        divides = region is not None and (self.plan.sequence or region.divides)
        return region is not None and divides and has_dropout(self.modules[region.name])

    def _install_region(self, region: Region, module: nn.Module) -> None:
        plan, group, place = self.plan, self.group, self.places[region.name] + len(self.places)
        if self._draws_own(region):
            if not plan.sequence:
                draw_within(module, self.streams)
            elif not region.divides:
                draw_within(module, self.streams, place)
            elif not region.plain:
                self._switch_after(module, place, shared=False)
        if plan.styles.get(region.name) in ROWS:
            return
        if plan.sequence:
            sequence = functools.partial(split, group=group, dim=SEQUENCE)
            whole = functools.partial(gather, group=group, dim=SEQUENCE, summands=region.plain)
            change(module, before=whole, after=None if region.plain else sequence)
        elif region.plain:
            change(module, before=self.summed)

    def _switch_after(self, module: nn.Module, place: int, *, shared: bool) -> None:
        def switched(value: Tensor) -> Tensor:
            if module.training:
                self.streams.switch(place, shared=shared)
            return value

        change(module, after=switched)


def local_value(
    module: nn.Module, name: str, group: ProcessGroup | None = None,
    chunk: tuple[int, int] = (1, 0), factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """This rank's part of a parameter, differentiable: one of several equal chunks of it, times a
    factor. Its gradients are summed over `group`, in fp32."""
    parameter: Any = module._parameters[name]
    value = local_part(parameter)
    if group is not None:
        value = sum_gradients(value.float(), group).to(value.dtype)
    count, number = chunk
    value = value if count == 1 else value.chunk(count)[number]
    return value if factor == 1.0 else value * factor


def use_local_values(
    module: nn.Module, values: Values, inside: Iterable[nn.Module] | None = None
) -> None:
    """Let the modules `inside` of a module, by default all, find local tensors under their
    parameters' names while its forward runs, unless they find them already."""
    readers = list(module.modules() if inside is None else inside)

    def around(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        new = [(one, n) for one in readers for n in values[one] if n not in one.__dict__]
        try:
            for one, name in new:
                # Attributes are looked up here before they are in `_parameters`.
                one.__dict__[name] = values[one][name]()
            return forward(*args, **kwargs)
        finally:
            for one, name in new:
                one.__dict__.pop(name, None)

    replace_forward(module, around)


def replace_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Call `around(forward, *args, **kwargs)` instead of the forward method."""
    module.forward = functools.partial(around, module.forward)


def change(module: nn.Module, *, before: Change | None = None, after: Change | None = None) -> None:
    """Change the hidden states that `module` takes, and those that it returns, by themselves or
    first in a tuple."""

    def around(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if before is not None and args:
            args = before(args[0]), *args[1:]
        elif before is not None:
            kwargs = {**kwargs, "hidden_states": before(kwargs["hidden_states"])}
        output = forward(*args, **kwargs)
        if after is None:
            return output
        return (after(output[0]), *output[1:]) if isinstance(output, tuple) else after(output)

    replace_forward(module, around)


def install_embedding(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank looks up its rows of the embedding, and zeros for others; then ranks are summed."""
    assert isinstance(module, nn.Embedding)
    own, group = own_chunk(module.num_embeddings, mesh), mesh.get_group()
    if module.padding_idx is not None:
        module.padding_idx = own.index(module.padding_idx) if module.padding_idx in own else None

    def around(forward: Forward, tokens: Tensor) -> Tensor:
        here = (tokens >= own.start) & (tokens < own.stop)
        found: Tensor = forward(torch.where(here, tokens - own.start, 0))
        return all_reduce(found.masked_fill(~here[..., None], 0), group)

    replace_forward(module, around)


def divided_experts(forward: Forward, *args: Any, group: ProcessGroup, **kwargs: Any) -> Tensor:
    """Each rank has a part of every expert; states, indices and weights come complete."""
    summed = (
        sum_gradients(one, group) if isinstance(one, Tensor) and one.is_floating_point() else one
        for one in args
    )
    return all_reduce(forward(*summed, **kwargs), group)


def whole_logits(value: Tensor, *, mesh: DeviceMesh, vocabulary: int) -> Tensor:
    """Logits of this rank's part of the vocabulary, as a DTensor that says so."""
    whole = torch.empty(*value.shape[:-1], vocabulary, device="meta")
    return DTensor.from_local(
        value, mesh, [Shard(-1)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def latent_states(value: Tensor, *, group: ProcessGroup, rope: int) -> Tensor:
    """Outputs of latent attention's first layer; all ranks' heads use the last `rope` of them."""
    latent, rotary = torch.split(value, [value.shape[-1] - rope, rope], dim=-1)
    return torch.cat([latent, sum_gradients(rotary, group)], dim=-1)


SEEDS = 1 << 40
STRIDE = 0x9E3779B1  # odd, so that places in one block have different seeds


@dataclass(frozen=True)
class Streams:
    """Random numbers of dropout on one of `size` ranks: different masks on what ranks divide, equal
    ones on what each has whole. Ranks of a group begin a step with equal states of torch's
    generators. Within a block, or a layer that ranks divide, these are seeded by a number that all
    ranks draw alike, with or without their rank. There is no other state, so checkpoints and
    activation checkpointing need not know. The number is part of the seed, so that it is known in a
    recomputed part too. No device is waited for."""

    rank: int
    size: int

    def switch(self, place: int, *, shared: bool, drawn: int | None = None) -> None:
        """Inside of what `draw_within` has changed: draw a place's numbers up to its end."""
        if drawn is None:
            drawn = torch.initial_seed() // (self.size + 1)
        seed = (drawn + place * STRIDE) % SEEDS
        torch.manual_seed(seed * (self.size + 1) + (0 if shared else 1 + self.rank))


def draw_within(module: nn.Module, streams: Streams, place: int | None = None) -> None:
    """Have the forward of `module`, while it trains, draw other numbers than the other ranks, where
    all would draw the same; or, inside of such a module, the same numbers at a `place`."""

    def around(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        drawn = None if place is not None else int(torch.randint(SEEDS, (), device="cpu"))
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            streams.switch(place or 0, shared=place is not None, drawn=drawn)
            return forward(*args, **kwargs)

    replace_forward(module, around)


def has_dropout(module: nn.Module) -> bool:
    """Whether `module` draws random numbers in training."""
    return any(
        (isinstance(one, nn.Dropout) and one.p > 0)
        or any("drop" in n and isinstance(p, float) and p > 0 for n, p in vars(one).items())
        for one in module.modules()
    )
