"""Checks of the axes of parallelism against each other, the rest of a recipe, and the model's
config, where it can be read without a network."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import PlanView, Problem, traits
from stages.model.compat import is_multimodal
from stages.model.config_checks import (
    BLOCKS,
    EXPERTS,
    config_of,
    declarations,
    has_experts,
    hf_model,
)
from stages.wrap.axes import (
    FIELDS,
    FOLDED,
    SEVERAL_STAGES,
    SPLIT_BACKWARD,
    PipelineParallel,
    axis_sizes,
)
from stages.wrap.types_compat import NO_BLOCKS, NO_PLAN, REFUSED, SINKS, WITHOUT_GRADIENT

HEADS = ("num_attention_heads", "n_head", "n_heads")


def axis_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Axes that do not divide the processes, or that nothing else allows."""
    if (pipeline := getattr(stage, "pipeline_parallel", None)) is not None:
        yield from _pipeline_problems(pipeline, stage, plan)
    divides_layers = getattr(stage, "tensor_parallel", None) is not None
    for model in declarations(stage, plan) if divides_layers else ():
        if isinstance(model, traits.NeedsWholeWeights):
            for message, hint in model.needs_whole_weights():
                yield Problem(message=message, key="tensor_parallel", hint=hint)
    sizes, left = axis_sizes(stage), plan.procs
    if sizes.get("context", 1) > 1:
        why = "of all tokens of a micro-batch, and a rank has a slice of them"
        yield from _router_problems("context_parallel", why, stage, plan)
    if getattr(stage, "expert_parallel", None) is not None:
        # Found without importing it.
        spec = importlib.util.find_spec("transformers")
        folders = [] if spec is None else spec.submodule_search_locations or []
        if not any(Path(one, "distributed", "expert_parallel.py").exists() for one in folders):
            message = "needs a newer transformers, whose models divide their experts among ranks"
            yield Problem(
                message=message, key="expert_parallel", hint="pip install -U transformers"
            )
    yield from config_problems(stage, plan)
    for axis, size in sizes.items():
        if left % size:
            whole = "processes" if left == plan.procs else f"of {plan.procs} processes"
            message = f"{left} {whole} do not divide into groups of {size}"
            yield Problem(message=message, key=f"{FIELDS[axis]}.size")
            return
        left //= size


def _router_problems(key: str, why: str, stage: Any, plan: PlanView) -> Iterator[Problem]:
    """A router loss, which the axis of field `key` does not support because of `why`."""
    for train in plan.readers(stage):
        if isinstance(train, traits.AddsRouterLoss) and train.router_loss is not None:
            yield Problem(
                message=f"the train slot's router_loss is {why}",
                key=key,
                hint="leave out router_loss there",
            )


def _pipeline_problems(block: PipelineParallel, stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Fields of a schedule that it does not have, and what it does not allow elsewhere."""
    schedule, key = block.schedule, "pipeline_parallel.stages_per_rank"
    if block.stages_per_rank is not None and schedule not in SEVERAL_STAGES:
        hint = f"leave it out, or choose {', '.join(SEVERAL_STAGES)}"
        yield Problem(message=f"{schedule} has one stage a rank", key=key, hint=hint)
    elif schedule in FOLDED and block.per_rank != 2:
        yield Problem(message="ZBVZeroBubble has two stages a rank", key=key)
    found = []
    for model in declarations(stage, plan) if schedule in SPLIT_BACKWARD else ():
        if isinstance(model, traits.ChangesBlocks) and model.recomputes_operations:
            what = "the model slot's activation_checkpointing.keep does"
            found.append((what, "set keep: nothing there"))
        if isinstance(model, traits.ChangesBlocks) and model.compile is not None:
            found.append(("compiled blocks do", "leave out compile in the model slot"))
    for train in plan.readers(stage) if schedule in SPLIT_BACKWARD else ():
        if isinstance(train, traits.ChunksLoss) and train.loss_chunk_size is not None:
            found.append(("a loss in chunks does", "leave out loss_chunk_size in the train slot"))
    why = f"{schedule} runs backward in two halves, for inputs and for weights, which"
    for what, hint in found:
        hint = f"{hint}, or choose another schedule"
        yield Problem(
            message=f"{why} {what} not allow", key="pipeline_parallel.schedule", hint=hint
        )
    why = "a mean over all layers, and a stage has some of them"
    yield from _router_problems("pipeline_parallel", why, stage, plan)


def config_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Axes that do not divide the model of the recipe."""
    config, model = config_of(stage, plan), hf_model(stage, plan)
    if config is None:
        return
    part = config.get("text_config")
    text = part if isinstance(part, Mapping) else config
    if not (model and model.trust_remote_code and "auto_map" in config):
        yield from _type_problems(stage, _types(config), model.attention if model else "")

    def stated(names: Sequence[str]) -> int:
        """The first of the named sizes that the config states; 0 if it states none."""
        return next((text[name] for name in names if type(text.get(name)) is int), 0)

    # Each rank of a tensor-parallel group has a share of the heads, and context-parallel ranks
    # share those of one such rank.
    sizes, heads, among = axis_sizes(stage), stated(HEADS), 1
    for axis in ("tensor", "context"):
        among *= sizes.get(axis, 1)
        if axis in sizes and heads % among:
            message = f"the model has {heads} attention heads, which do not divide among {among} "
            yield Problem(message=f"{message}ranks", key=f"{FIELDS[axis]}.size")
            break
    if (pipeline := getattr(stage, "pipeline_parallel", None)) is not None:
        yield from _block_problems(pipeline, stated(BLOCKS), config)
    field, experts = getattr(stage, "expert_parallel", None), stated(EXPERTS)
    if field is not None and field.size > 1 and not has_experts(config):
        yield Problem(
            message="the model has no experts", key="expert_parallel", hint="leave it out"
        )
    elif field is not None and experts % field.size:
        message = f"the model's {experts} experts do not divide among {field.size} ranks"
        yield Problem(message=message, key="expert_parallel.size")


def _types(config: Mapping[str, Any]) -> set[str]:
    """The types of the model and of its language model, which may be a part of it."""
    kind, part = str(config.get("model_type")), config.get("text_config")
    text = {str(part.get("model_type", f"{kind}_text"))} if isinstance(part, Mapping) else set()
    return {kind, *text}


def _type_problems(stage: Any, kinds: set[str], attention: str) -> Iterator[Problem]:
    """Axes that do not divide models of these types, whatever their sizes."""
    fields = {name: getattr(stage, name, None) for name in REFUSED}
    asked = {name: one for name, one in fields.items() if one is not None and one.size > 1}
    for field in asked:
        for kind in kinds & REFUSED[field].keys():
            yield Problem(
                message=f"a {kind} {REFUSED[field][kind]}", key=field, hint="leave it out"
            )
    eager = "context_parallel" in asked and attention == "eager"
    for kind in kinds & SINKS if eager else ():
        message = f"a {kind} has attention sinks, which its eager attention does not divide"
        hint = "set another attention in the model slot, or leave it out"
        yield Problem(message=message, key="context_parallel", hint=hint)
    unplanned = "tensor_parallel" in asked and not asked["tensor_parallel"].plan
    for kind in kinds & NO_PLAN if unplanned else ():
        message = f"transformers has no plan that divides the layers of a {kind}"
        yield Problem(
            message=message, key="tensor_parallel", hint="name its layers in tensor_parallel.plan"
        )
    for kind in kinds & NO_BLOCKS if getattr(stage, "units", None) == "block" else ():
        message = f"transformers does not say which modules of a {kind} are its blocks"
        yield Problem(message=message, key="units", hint="name their classes")


def _block_problems(
    field: PipelineParallel, blocks: int, config: Mapping[str, Any]
) -> Iterator[Problem]:
    """Blocks and ends of a model that do not make the stages of a pipeline."""
    if is_multimodal(config):
        message = "the language model of a model of more than text is not divided into stages"
        yield Problem(message=message, key="pipeline_parallel", hint="leave it out")
    if 0 < blocks < (stages := field.size * field.per_rank):
        message = f"the model's {blocks} blocks do not make {stages} pipeline stages"
        yield Problem(message=message, key="pipeline_parallel.size")
    if config.get("tie_word_embeddings") is True and field.schedule in FOLDED:
        message = f"{field.schedule} puts the first and the last pipeline stage on one rank, and "
        message += "the model's head shares the embedding's weight"
        yield Problem(
            message=message, key="pipeline_parallel.schedule", hint="choose another schedule"
        )


def gradient_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """A replica of a model with parameters that get no gradient, for which torch waits."""
    config, models = config_of(stage, plan), declarations(stage, plan)
    adapted = any(isinstance(one, traits.FreezesModel) for one in models)
    if config is None or adapted or stage.static_graph or stage.find_unused_parameters:
        return
    for kind in WITHOUT_GRADIENT & _types(config):
        message = f"some parameters of a {kind} get no gradient from text, and gradients in their "
        yield Problem(
            message=f"{message}buckets are not averaged then", hint="set static_graph: true"
        )
