"""Divide a model's layers among tensor-parallel ranks, by a plan resolved in `plan.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from stages.collectives import SEQUENCE, gather, split, sum_gradients
from stages.wrap.axes import TensorParallel
from stages.wrap.tensor.layers import COLUMNS, ROWS, layer_sizes, transposed
from stages.wrap.tensor.placements import place_parameters
from stages.wrap.tensor.plan import Region, TensorPlan, resolve
from stages.wrap.tensor.random_streams import Streams, has_dropout
from stages.wrap.tensor.styles import (
    Locals,
    change_input,
    change_output,
    find_ahead,
    install_columns,
    install_embedding,
    install_experts,
    install_head,
    install_latent,
    install_rows,
    local,
    replace_forward,
    share_heads,
    use_local_parameters,
)
from stages.wrap.types_compat import refuse_type


def divide_layers(
    config: TensorParallel,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    compiled: Sequence[nn.Module] = (),
    *,
    late: bool = False,
) -> None:
    """Divide `model`, whose parameters are on the meta device, over the one axis `mesh`, in place,
    as a recipe asks for it; `compiled` modules have compiled forward methods, and `late` parameters
    are there no earlier than the modules that have them run. Raises StageError for a model that
    does not divide so.

    Every parameter becomes a DTensor on `mesh`, tied ones stay one object; its elements are not
    communicated. The forward takes the same tokens on every rank, and returns logits that are a
    DTensor sharded by the vocabulary if the plan divides the output layer, else complete. With
    `sequence` the length has to divide among the ranks.

    Gradients are those of a loss that every rank computes alike: parts where weights are divided,
    complete and equal on all ranks where they are not.
    """
    plan = resolve_plan(config, model, blocks)
    if mesh.size() != plan.size:
        raise ValueError(f"a plan for {plan.size} ranks on a mesh of {mesh.size()}")
    place_parameters(model, mesh, plan.placements)
    _Installer(model, mesh, plan, compiled, late=late).install()


def resolve_plan(
    config: TensorParallel, model: nn.Module, blocks: Sequence[nn.Module]
) -> TensorPlan:
    """The plan of a model for what a recipe asks. Raises StageError for a model that does not
    divide so."""
    refuse_type("tensor_parallel", model.config)
    return resolve(model, blocks, size=config.size, patterns=config.plan, sequence=config.sequence)


class _Installer:
    """Replaces forward methods, from the innermost change to the outermost."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, plan: TensorPlan, compiled: Sequence[nn.Module],
        *, late: bool,
    ) -> None:  # fmt: skip
        self.compiled = compiled
        self.late = late
        self.model = model
        self.mesh = mesh
        self.plan = plan
        self.group = mesh.get_group()
        self.streams = Streams(mesh.get_local_rank(), mesh.size())
        self.modules = dict(model.named_modules())
        self.locals: dict[nn.Module, Locals] = {}

    def install(self) -> None:
        for name, module in self.modules.items():
            self._localize(name, module)
        for name, style in self.plan.styles.items():
            if name in self.modules:
                self._install_style(name, self.modules[name], style)
        for number, region in enumerate(self.plan.regions.values()):
            self._install_region(region, number)
        blocks = [self.modules[name] for name in self.plan.blocks]
        for block in blocks:
            if self.plan.sequence and has_dropout(block):
                _within(block, self.streams.own)
        for block in self.compiled:
            self._find_ahead(block)
        if self.plan.sequence:
            change_input(blocks[0], lambda value: split(value, self.group, SEQUENCE))
            change_output(
                blocks[-1], lambda value: gather(value, self.group, SEQUENCE, summands=False)
            )

    def _localize(self, name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""
        own = [leaf for leaf, one in module._parameters.items() if one is not None]
        summed = frozenset(leaf for leaf in own if f"{prefix}{leaf}" in self.plan.summed)
        hidden: dict[str, Any] = {}
        entry = self._entry(name)
        if entry in self.plan.shared_heads:
            if ".lora_A." not in f"{name}.":
                hidden = share_heads(module, self.mesh, self.plan.shared_heads[entry])
            attention: Any = self.modules[entry.rpartition(".")[0]]
            if not getattr(attention, "keys_are_shared", False):
                keys = self.plan.shared_heads[entry]
                queries = attention.num_key_value_groups * keys // self.plan.size
                attention.num_key_value_groups = queries
                attention.keys_are_shared = True
        elif "bias" in own and self.plan.styles.get(entry) in ROWS:
            hidden = {"bias": _no_bias}
        self.locals[module] = use_local_parameters(module, self.group, summed, hidden)

    def _find_ahead(self, module: nn.Module) -> None:
        find_ahead(module, {one: self.locals[one] for one in module.modules()})

    def _entry(self, name: str) -> str:
        """The entry of the plan that a module is, or is in; empty if there is none."""
        while name and name not in self.plan.styles:
            name = name.rpartition(".")[0]
        return name

    def _install_style(self, name: str, module: nn.Module, style: str) -> None:
        region = self._region(name)
        plain = region is not None and region.plain
        if name == self.plan.head:
            sizes = layer_sizes(module)
            assert sizes is not None
            install_head(module, self.mesh, sizes[1])
        elif style in COLUMNS:
            gathers = style.endswith(("gather_output", "rep"))
            self._install_columns(name, module, sums=not plain, gathers=gathers)
        elif style in ROWS:
            self._install_rows(name, module, style, scatters=plain and self.plan.sequence)
        elif style == "embedding_rowwise":
            install_embedding(module, self.mesh)
        elif style == "moe_tp_experts":
            install_experts(module, self.group)
        elif style == "mla_kv_a_proj":
            config: Any = self.model.config
            install_latent(module, self.group, config.get_text_config().qk_rope_head_dim)

    def _install_columns(self, name: str, module: nn.Module, *, sums: bool, gathers: bool) -> None:
        install_columns(module, self.group, sums=sums, gathers=gathers)
        region = self._region(name)
        if has_dropout(module) and region is not None and self._randomised(region):
            # Dropout of an update's inputs, which are complete.
            _within(module, functools.partial(self.streams.shared, self._stretch(name)))

    def _install_rows(self, name: str, module: nn.Module, style: str, *, scatters: bool) -> None:
        bias = None
        for owner_name, owner in module.named_modules():
            if owner._parameters.get("bias") is not None:
                full = f"{name}.{owner_name}.bias" if owner_name else f"{name}.bias"
                summed = frozenset({"bias"} if full in self.plan.summed else ())
                find = functools.partial(local, owner, "bias", self.group, summed)
                self.locals[owner] = _also(self.locals[owner], find)
                bias = functools.partial(_added, owner, find)
        splits = style.endswith(("split_input", "rep"))
        install_rows(module, self.group, splits=splits, scatters=scatters, bias=bias)
        if splits and has_dropout(module) and not self._divides(name):
            # Dropout of an update's inputs, of which each rank has a slice.
            _within(module, self.streams.own)
        region = self._region(name)
        if region is not None and self._randomised(region):
            self._switch_behind(module, self._stretch(name), shared=not scatters)

    def _install_region(self, region: Region, number: int) -> None:
        module = self.modules[region.name]
        if not self.late and self.modules[region.block] not in self.compiled:
            self._find_ahead(module)
        if has_dropout(module):
            self._install_region_streams(module, region, number)
        if self.plan.styles.get(region.name) in ROWS:
            return
        if self.plan.sequence:
            change_input(
                module,
                lambda value: gather(value, self.group, SEQUENCE, summands=region.plain),
            )
            if not region.plain:
                change_output(module, lambda value: split(value, self.group, SEQUENCE))
        elif region.plain:
            change_input(module, lambda value: sum_gradients(value, self.group))

    def _install_region_streams(self, module: nn.Module, region: Region, number: int) -> None:
        divides = self._divides(region.name)
        if not self.plan.sequence:
            if divides:
                _within(module, self.streams.own)
        elif not divides:
            _within(module, functools.partial(self.streams.shared, number))
        elif not region.plain:
            self._switch_behind(module, number, shared=False)

    def _switch_behind(self, module: nn.Module, stretch: int, *, shared: bool) -> None:
        def switched(value: Tensor) -> Tensor:
            if module.training:
                self.streams.switch(stretch, shared=shared)
            return value

        change_output(module, switched)

    def _region(self, name: str) -> Region | None:
        found = (r for n, r in self.plan.regions.items() if name == n or name.startswith(f"{n}."))
        return next(found, None)

    def _divides(self, name: str) -> bool:
        """Whether activations inside of the region that `name` is in are sharded by features."""
        region = self._region(name)
        return region is not None and any(
            style == "colwise" and self._region(n) is region
            for n, style in self.plan.styles.items()
        )

    def _randomised(self, region: Region) -> bool:
        """Whether the region is run inside of a stream that is this rank's own."""
        return has_dropout(self.modules[region.name]) and (
            self.plan.sequence or self._divides(region.name)
        )

    def _stretch(self, name: str) -> int:
        """A number of this place in its block."""
        return 1 + list(self.plan.styles).index(name) + len(self.plan.regions)


def _within(module: nn.Module, context: Any) -> None:
    def around(forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        with context():
            return forward(*args, **kwargs)

    replace_forward(module, around)


ADDED = "bias_added_later"
"""Name under which a layer has the bias that is added after its outputs are summed, if that was
found ahead."""


def _also(find: Locals, bias: Callable[[], Tensor]) -> Locals:
    return lambda: {**find(), ADDED: bias()}


def _added(owner: nn.Module, find: Callable[[], Tensor]) -> Tensor:
    if ADDED in owner.__dict__:
        found: Tensor = owner.__dict__[ADDED]
        return found
    return find()


def _no_bias(module: nn.Module) -> Tensor | None:
    """Value of a bias that is added later."""
    if not transposed(module):
        return None
    bias = local(module, "bias", None)  # type: ignore[arg-type]
    return torch.zeros_like(bias)
