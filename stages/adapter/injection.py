"""Updates of a model's linear layers and experts, and a report of matrices without one.

An expert's weights are stacked in one tensor with all experts' of its layer. Each expert has a pair
of factors, A (rank, inputs) and B (outputs, rank). All experts' factors are two tensors,
`lora_A.NAME` and `lora_B.NAME` of the experts' module. Tokens are sorted by expert, as
transformers' own fast implementation does, and multiplied group by group: W x + s B A x.

peft adds s B A to the weights instead. The numbers are the same, but it keeps a changed copy of all
experts of each layer until backward, and makes a gradient as large. Here a layer keeps, for each
token and expert that it is sent to, the inputs of both projections and `rank` numbers for each.

The experts of a layer are one module of transformers with tensors of all experts. Whether they are
gated, transposed or biased is written into it by the decorator that lets implementations be chosen;
contract tests guard these undocumented names.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline import StageError
from pipeline.utils import closest, plural
from stages.adapter.compat import ADAPTER, Layer, import_peft, only_declared, quiet
from stages.adapter.peft_files import peft_config
from stages.adapter.settings import AdaptedModel, LoraSettings
from stages.model.block_changes import is_linear, linear_layers
from stages.model.declared import logical_numel, matches, refuse_idle

SHOWN = 8
ALIGNED = 8
"""Rows that grouped products read are multiples of 16 bytes: 8 numbers of 16 bits."""


def inject(stage: LoraSettings, model: nn.Module) -> None:
    """Put updates into the layers of `model` that the stage names, and freeze everything else but
    the parameters that it trains as a whole. Raises StageError for names that match nothing."""
    parameters = dict(model.named_parameters())
    for name, one in parameters.items():
        if one.is_floating_point() and not one.requires_grad and matches(name, stage.train_also):
            raise StageError(
                f"train_also: {name} is frozen by the model slot",
                hint="leave it out of one of them: `train_also` here, or `frozen` there",
            )
    experts = [name for name, _, _ in stacked_weights(model)]
    for target in stage.target_parameters or ():
        if not any(f".{name}".endswith(f".{target}") for name in experts):
            ends = ", ".join(sorted({".".join(name.split(".")[-3:]) for name in experts}))
            raise StageError(
                f"adapter.lora: no stacked weights of experts have a name that ends in {target!r}",
                hint=f"they are called {ends}" if ends else "leave out target_parameters",
            )
    if stage.target_parameters is None:
        others = [] if stage.misses_experts else experts
        experts = [name for name in others if not matches(name, stage.train_also)]
    else:
        chosen = tuple(f".{end}" for end in stage.target_parameters)
        experts = [name for name in experts if f".{name}".endswith(chosen)]
    if stage.targets:
        _inject_linear(stage, model)
    root = stage.rank if stage.scaling == "standard" else math.sqrt(stage.rank)
    add_updates(model, experts, LowRank(stage.rank, stage.alpha / root, stage.dropout))
    found = layers(model)
    for target in () if isinstance(stage.targets, str) else stage.targets:
        names = (f".{layer.name}" for layer in found if layer.experts is None)
        if not any(name.endswith(f".{target}") for name in names):
            raise StageError(
                f"adapter.lora: no linear layer's name ends in {target!r}",
                hint=_linear_hint(model, target),
            )
    updated = {layer.weight for layer in found}
    for name, parameter in parameters.items():
        wanted = matches(name, stage.train_also)
        if wanted and not parameter.is_floating_point():
            raise StageError(f"train_also: {name} is in 4 bits, which cannot be trained")
        if wanted and name in updated:
            raise StageError(
                f"train_also: {name} is trained through its update",
                hint="leave the layer out of `targets` to train its weight as a whole",
            )
        parameter.requires_grad_(wanted)
    refuse_idle("train_also", stage.train_also, parameters, "parameter of the model")


def _inject_linear(stage: LoraSettings, model: nn.Module) -> None:
    peft = import_peft()
    targets = None
    if stage.targets == "all-linear":
        targets = [name for name, _ in linear_layers(model)]
        if not targets:
            raise StageError(f"adapter.lora: {type(model).__name__} has no linear layers")
    config = peft_config(stage, targets)
    config.init_lora_weights = False  # peft's values would be overwritten
    try:
        with quiet(), only_declared():
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise StageError(f"adapter.lora: {error}", hint=_linear_hint(model)) from error
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            # It would follow a dtype that the strategy is about to change.
            module.cast_input_dtype_enabled = False


def _linear_hint(model: nn.Module, target: str = "") -> str:
    """A hint with the last parts of linear layers' names, also of layers that have updates."""
    ends = {
        name.removesuffix(".base_layer").rpartition(".")[2]
        for name, module in model.named_modules()
        if is_linear(module) and "lora_" not in name
    }
    near = closest(target.rpartition(".")[2], ends)
    asked = f"did you mean `{near}`? " if near else ""
    return f"{asked}linear layers are called " + ", ".join(sorted(ends)[:SHOWN])


def layers(model: nn.Module) -> list[Layer]:
    """Return the updated layers and stacked weights. Raises StageError for odd kinds."""
    lora = import_peft().tuners.lora
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, lora.LoraLayer):
            continue
        if not isinstance(module, lora.Linear):
            kind = type(module.get_base_layer()).__name__
            raise StageError(
                f"adapter.lora: {name} is of class {kind}, which is not a linear layer",
                hint=_linear_hint(model),
            )
        dora, transposed = bool(module.use_dora.get(ADAPTER)), bool(module.fan_in_fan_out)
        if transposed and dora:
            raise StageError(
                f"adapter.lora: {name} keeps its weight transposed, which DoRA cannot merge",
                hint="set dora: false",
            )
        layer = Layer(
            name=name,
            weight=f"{name}.weight",
            down=f"{name}.lora_A.{ADAPTER}.weight",
            up=f"{name}.lora_B.{ADAPTER}.weight",
            magnitude=f"{name}.lora_magnitude_vector.{ADAPTER}.weight" if dora else None,
            rank=int(module.r[ADAPTER]),
            scaling=float(module.scaling[ADAPTER]),
            transposed=transposed,
            inputs=int(module.in_features),
            outputs=int(module.out_features),
        )
        found.append(layer)
    experts: Any
    for name, experts, leaf in stacked_weights(model):
        down = getattr(experts, "lora_A", None)
        if not isinstance(down, Factors) or leaf not in down.shapes:
            continue
        owner, order = name.rpartition(".")[0], list(down.shapes)
        count, rank, inputs = down.shapes[leaf]
        layer = Layer(
            name=name,
            weight=name,
            down=f"{owner}.lora_A.{leaf}",
            up=f"{owner}.lora_B.{leaf}",
            rank=rank,
            scaling=experts.low_rank.scaling,
            transposed=bool(experts.is_transposed),
            inputs=inputs,
            outputs=experts.lora_B.shapes[leaf][1],
            experts=count,
            nested=len(order) - 1 - order.index(leaf),
        )
        found.append(layer)
    return found


def log_summary(source: AdaptedModel, log: logging.Logger) -> None:
    """Log the number of trained parameters. Warn of linear layers and stacked weights without an
    update, and say how to include them; mention routers, which are usually left as they are."""
    stage, parameters = source.stage, dict(source.outline.named_parameters())
    trained = sum(parameters[name].numel() for name in source.trained)
    stacked = sum(layer.experts is not None for layer in source.layers)
    also = f" and {plural(stacked, 'stack')} of experts" if stacked else ""
    log.info(
        "%s%s get updates; %s parameters are trained",
        plural(len(source.layers) - stacked, "layer"), also, f"{trained:,}",
    )  # fmt: skip
    for kind, sizes in _left_out(source.outline, source.layers).items():
        what = f"{sizes.total():,} parameters of {', '.join(sizes)}"
        if kind == "router":
            log.info("%s stay as they are; train_also trains them as a whole", what)
            continue
        ends = sorted({pattern.rpartition(".*.")[2] for pattern in sizes})
        whole = ", ".join(f"'*.{end}'" for end in ends)
        advice = f"train_also: [{whole}] trains them as a whole"
        if kind == "linear":
            names = ", ".join(end.removesuffix(".weight") for end in ends)
            advice = f"targets: all-linear includes them, or their names {names}"
        elif kind == "experts" and stage.dora:
            advice = f"DoRA has none for experts; {advice}"
        elif kind == "experts":
            advice = f"target_parameters: [{', '.join(ends)}] includes them"
        log.warning("%s get no update and stay as they are; %s", what, advice)


def _left_out(model: Any, layers: Sequence[Layer]) -> dict[str, Counter[str]]:
    """Kind -> names, without the numbers of blocks, of the matrices without an update and their
    elements. Embeddings, the head and biases do not count."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    updated = {layer.weight for layer in layers}
    experts = {name for name, _, _ in stacked_weights(model)}
    packed = logical_numel(model)
    found: dict[str, Counter[str]] = {}
    for owner, module in model.named_modules():
        if any(module is table for table in tables) or owner.endswith(".base_layer"):
            continue
        for leaf, weight in module.named_parameters(recurse=False):
            name, linear = f"{owner}.{leaf}", is_linear(module)
            if name in updated or weight.requires_grad or "bias" in leaf:
                continue
            if not linear and weight.ndim < 2:
                continue
            stacked = "experts" if name in experts else "stacked" if weight.ndim > 2 else "router"
            shown = re.sub(r"\.\d+\.", ".*.", f"{owner}.weight" if linear else name)
            sizes = found.setdefault("linear" if linear else stacked, Counter())
            sizes[shown] += packed.get(name) or weight.numel()
    return found


class Factors(nn.Module):
    """One factor of each updated weight of an experts' module, by its name there."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        """Shapes of the factors, also while they are partitioned."""
        for name, shape in shapes.items():
            empty = torch.empty(shape, dtype=torch.float32, device=device)
            self.register_parameter(name, nn.Parameter(empty))


class LowRank(NamedTuple):
    """Settings of the updates of a module."""

    rank: int
    scaling: float
    dropout: float


def first_projection(experts: Any) -> str:
    """Return the name of the tensor that the inputs are multiplied by."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def stacked_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield experts' weights that can have updates: name, their module, name in it."""
    said = ("is_transposed", "is_concatenated", "has_gate", "has_bias", "has_post_expert_norm")
    for owner, module in model.named_modules():
        if all(hasattr(module, name) for name in (*said, "num_experts")):
            multiplied = {first_projection(module), "down_proj"}
            for leaf, _ in module.named_parameters(recurse=False):
                if leaf in multiplied:
                    yield f"{owner}.{leaf}", module, leaf


def add_updates(model: nn.Module, names: Collection[str], settings: LowRank) -> None:
    """Give the stacked weights of these names updates."""
    chosen: dict[nn.Module, list[str]] = {}
    for name, module, leaf in stacked_weights(model):
        if name in names:
            chosen.setdefault(module, []).append(leaf)
    experts: Any
    for experts, leaves in chosen.items():
        downs, ups = {}, {}
        for leaf in leaves:
            weight = getattr(experts, leaf)
            # ZeRO keeps the whole shape of what it has partitioned.
            count, inputs, outputs = getattr(weight, "ds_shape", weight.shape)
            if not experts.is_transposed:
                inputs, outputs = outputs, inputs
            downs[leaf] = (count, settings.rank, inputs)
            ups[leaf] = (count, outputs, settings.rank)
        device = getattr(experts, leaves[0]).device
        experts.lora_A, experts.lora_B = Factors(downs, device), Factors(ups, device)
        experts.low_rank = settings
        experts.forward = functools.partial(forward, experts)


def forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Outputs of the experts, shape (tokens, width), as transformers' implementations compute them,
    with updates. `chosen` and `weights` have shape (tokens, experts for each token)."""
    picks = chosen.shape[1]
    # One row for each expert that a token is sent to, sorted by expert.
    expert, order = torch.sort(chosen.reshape(-1), stable=True)
    numbers = torch.arange(1, experts.num_experts + 1, device=expert.device)
    ends = torch.searchsorted(expert, numbers).to(torch.int32)

    def product(rows: Tensor, stacked: Tensor) -> Tensor:
        """Each expert's rows times its matrix, of shape (experts, inputs, outputs)."""
        if experts.config._experts_implementation == "eager":
            last = ends.tolist()
            spans = enumerate(zip([0, *last], last, strict=False))
            return torch.cat([rows[start:end] @ stacked[number] for number, (start, end) in spans])
        from transformers.integrations.moe import _grouped_mm

        grouped: Tensor = _grouped_mm(rows, stacked, ends)
        return grouped

    def project(leaf: str, rows: Tensor) -> Tensor:
        """Rows times a stacked weight and its update, with its bias."""
        weight = getattr(experts, leaf)
        found = product(rows, weight if experts.is_transposed else weight.mT)
        if leaf in experts.lora_A.shapes:
            rank, scaling, dropout = experts.low_rank
            down, up = getattr(experts.lora_A, leaf), getattr(experts.lora_B, leaf)
            if missing := -rank % ALIGNED:  # zeros, up to a size that grouped products can read
                down, up = F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))
            inputs = F.dropout(rows, dropout, training=experts.training)
            found = found + product(scaling * product(inputs, down.mT), up.mT)
        return found + getattr(experts, f"{leaf}_bias")[expert] if experts.has_bias else found

    rows = project(first_projection(experts), hidden[order // picks])
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = project("down_proj", rows)
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    rows = rows * weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    summed: Tensor = rows[back].view(len(hidden), picks, -1).sum(dim=1)
    return summed.to(hidden.dtype)
