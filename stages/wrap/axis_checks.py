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
    ExpertParallel,
    PipelineParallel,
    axis_sizes,
)
from stages.wrap.types_compat import NO_BLOCKS, NO_PLAN, REFUSED, SINKS, WITHOUT_GRADIENT

HEADS = ("num_attention_heads", "n_head", "n_heads")


def axis_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Axes that do not divide the processes, or that nothing else allows."""
    yield from _pipeline_problems(stage, plan)
    divides_layers = getattr(stage, "tensor_parallel", None) is not None
    for model in declarations(stage, plan) if divides_layers else ():
        if isinstance(model, traits.NeedsWholeWeights):
            for message, hint in model.needs_whole_weights():
                yield Problem(key="tensor_parallel", message=message, hint=hint)
    if axis_sizes(stage).get("context", 1) > 1:
        why = "of all tokens of a micro-batch, and a rank has a slice of them"
        yield from _router_problems("context_parallel", why, stage, plan)
    yield from _expert_problems(getattr(stage, "expert_parallel", None))
    yield from config_problems(stage, plan)
    sizes, left = axis_sizes(stage), plan.procs
    for axis, size in sizes.items():
        if left % size:
            whole = "processes" if left == plan.procs else f"of {plan.procs} processes"
            message = f"{left} {whole} do not divide into groups of {size}"
            yield Problem(key=f"{FIELDS[axis]}.size", message=message)
            return
        left //= size


def _expert_problems(block: ExpertParallel | None) -> Iterator[Problem]:
    """Experts to be divided by a transformers that cannot, found without importing it."""
    spec = importlib.util.find_spec("transformers")
    folders = [] if spec is None else spec.submodule_search_locations or []
    divides = any(Path(one, "distributed", "expert_parallel.py").exists() for one in folders)
    if block is not None and not divides:
        message = "needs a newer transformers, whose models divide their experts among ranks"
        yield Problem(key="expert_parallel", message=message, hint="pip install -U transformers")


def _router_problems(key: str, why: str, stage: Any, plan: PlanView) -> Iterator[Problem]:
    """A router loss, which the axis of field `key` does not support because of `why`."""
    for train in plan.readers(stage):
        if isinstance(train, traits.AddsRouterLoss) and train.router_loss is not None:
            message = f"the train slot's router_loss is {why}"
            yield Problem(key=key, message=message, hint="leave out router_loss there")


def _split_backward_problems(schedule: str, stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Settings that do not work with a backward in two halves, for inputs and later for weights."""
    why = f"{schedule} runs backward in two halves, for inputs and for weights, which"
    other = "or choose another schedule"

    def problem(what: str, hint: str) -> Problem:
        message = f"{why} {what} not allow"
        return Problem(key="pipeline_parallel.schedule", message=message, hint=f"{hint}, {other}")

    for model in declarations(stage, plan):
        if isinstance(model, traits.ChangesBlocks) and model.recomputes_operations:
            yield problem(
                "the model slot's activation_checkpointing.keep does",
                "set keep: nothing there",
            )
        if isinstance(model, traits.ChangesBlocks) and model.compile is not None:
            yield problem("compiled blocks do", "leave out compile in the model slot")
    for train in plan.readers(stage):
        if isinstance(train, traits.ChunksLoss) and train.loss_chunk_size is not None:
            yield problem("a loss in chunks does", "leave out loss_chunk_size in the train slot")


def _pipeline_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    block: PipelineParallel | None = getattr(stage, "pipeline_parallel", None)
    if block is None:
        return
    folded = block.schedule in FOLDED
    if block.stages_per_rank is not None and block.schedule not in SEVERAL_STAGES:
        yield Problem(
            key="pipeline_parallel.stages_per_rank",
            message=f"{block.schedule} has one stage a rank",
            hint=f"leave it out, or choose {', '.join(SEVERAL_STAGES)}",
        )
    elif folded and block.per_rank != 2:
        message = "ZBVZeroBubble has two stages a rank"
        yield Problem(key="pipeline_parallel.stages_per_rank", message=message)
    if block.schedule in SPLIT_BACKWARD:
        yield from _split_backward_problems(block.schedule, stage, plan)
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
    yield from _head_problems(axis_sizes(stage), _count(text, HEADS))
    tied = config.get("tie_word_embeddings") is True
    yield from _block_problems(stage, text, tied=tied, more_than_text=is_multimodal(config))
    yield from _expert_count_problems(stage, config, _count(text, EXPERTS))


def _types(config: Mapping[str, Any]) -> set[str]:
    """The types of the model and of its language model, which may be a part of it."""
    kind, part = str(config.get("model_type")), config.get("text_config")
    return (
        {kind, str(part.get("model_type", f"{kind}_text"))} if isinstance(part, Mapping) else {kind}
    )


def _type_problems(stage: Any, kinds: set[str], attention: str) -> Iterator[Problem]:
    """Axes that do not divide models of these types, whatever their sizes."""
    for field, reasons in REFUSED.items():
        asked = getattr(stage, field, None)
        for kind in kinds & reasons.keys() if asked is not None and asked.size > 1 else ():
            yield Problem(key=field, message=f"a {kind} {reasons[kind]}", hint="leave it out")
    sequence = getattr(stage, "context_parallel", None)
    eager = sequence is not None and sequence.size > 1 and attention == "eager"
    for kind in kinds & SINKS if eager else ():
        message = f"a {kind} has attention sinks, which its eager attention does not divide"
        hint = "set another attention in the model slot, or leave it out"
        yield Problem(key="context_parallel", message=message, hint=hint)
    tensor = getattr(stage, "tensor_parallel", None)
    unplanned = tensor is not None and tensor.size > 1 and not tensor.plan
    for kind in kinds & NO_PLAN if unplanned else ():
        message = f"transformers has no plan that divides the layers of a {kind}"
        hint = "name its layers in tensor_parallel.plan"
        yield Problem(key="tensor_parallel", message=message, hint=hint)
    for kind in kinds & NO_BLOCKS if getattr(stage, "units", None) == "block" else ():
        message = f"transformers does not say which modules of a {kind} are its blocks"
        yield Problem(key="units", message=message, hint="name their classes")


def gradient_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """A replica of a model with parameters that get no gradient, for which torch waits."""
    config, models = config_of(stage, plan), declarations(stage, plan)
    adapted = any(isinstance(one, traits.FreezesModel) for one in models)
    if config is None or adapted or stage.static_graph or stage.find_unused_parameters:
        return
    for kind in WITHOUT_GRADIENT & _types(config):
        yield Problem(
            message=f"some parameters of a {kind} get no gradient from text, and gradients in "
            "their buckets are not averaged then",
            hint="set static_graph: true",
        )


def _count(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """The first of the named sizes that a config states; 0 if it states none."""
    return next((config[name] for name in names if type(config.get(name)) is int), 0)


def _head_problems(sizes: Mapping[str, int], heads: int) -> Iterator[Problem]:
    """Each rank of a tensor-parallel group has a share of the heads, and context-parallel ranks
    share those of one such rank."""
    among = 1
    for axis in ("tensor", "context"):
        among *= sizes.get(axis, 1)
        if axis in sizes and heads % among:
            message = f"the model has {heads} attention heads, which do not divide among {among} "
            yield Problem(key=f"{FIELDS[axis]}.size", message=f"{message}ranks")
            return


def _block_problems(
    stage: Any, config: Mapping[str, Any], *, tied: bool, more_than_text: bool
) -> Iterator[Problem]:
    field, blocks = getattr(stage, "pipeline_parallel", None), _count(config, BLOCKS)
    if field is None:
        return
    if more_than_text:
        yield Problem(
            key="pipeline_parallel",
            message="the language model of a model of more than text is not divided into stages",
            hint="leave it out",
        )
    if 0 < blocks < field.size * field.per_rank:
        stages = f"{field.size * field.per_rank} pipeline stages"
        yield Problem(
            key="pipeline_parallel.size",
            message=f"the model's {blocks} blocks do not make {stages}",
        )
    if tied and field.schedule in FOLDED:
        yield Problem(
            key="pipeline_parallel.schedule",
            message=f"{field.schedule} puts the first and the last pipeline stage on one rank, and "
            "the model's head shares the embedding's weight",
            hint="choose another schedule",
        )


def _expert_count_problems(
    stage: Any, config: Mapping[str, Any], experts: int
) -> Iterator[Problem]:
    field = getattr(stage, "expert_parallel", None)
    if field is None or field.size == 1:
        return
    if not has_experts(config):
        message = "the model has no experts"
        yield Problem(key="expert_parallel", message=message, hint="leave it out")
    elif experts % field.size:
        message = f"the model's {experts} experts do not divide among {field.size} ranks"
        yield Problem(key="expert_parallel.size", message=message)
