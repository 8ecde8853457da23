"""Checks of the axes of parallelism against each other, the rest of a recipe, and the model's
config, where it can be read without a network."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
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
from stages.wrap.types_compat import NO_BLOCKS, NO_PLAN, REFUSED, SINKS

HEADS = ("num_attention_heads", "n_head", "n_heads")
Row = tuple[str, str, str]
"""Key, message and hint of a problem."""


def axis_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Axes that do not divide the processes or the model, or that nothing else allows."""
    rows = [*_recipe_rows(stage, plan), *_config_rows(stage, plan)]
    yield from (Problem(key=key, message=text, hint=hint) for key, text, hint in rows)
    left = plan.procs
    for axis, size in axis_sizes(stage).items():
        if left % size:
            whole = "processes" if left == plan.procs else f"of {plan.procs} processes"
            message = f"{left} {whole} do not divide into groups of {size}"
            yield Problem(message=message, key=f"{FIELDS[axis]}.size")
            return
        left //= size


def _recipe_rows(stage: Any, plan: PlanView) -> Iterator[Row]:
    """What the axes do not allow in other slots, or need to be installed."""
    routed = dict[str, str]()
    if (pipeline := getattr(stage, "pipeline_parallel", None)) is not None:
        yield from _schedule_rows(pipeline, stage, plan)
        routed["pipeline_parallel"] = "a mean over all layers, and a stage has some of them"
    if axis_sizes(stage).get("context", 1) > 1:
        why = "of all tokens of a micro-batch, and a rank has a slice of them"
        routed["context_parallel"] = why
    for train in plan.readers(stage) if routed else ():
        if isinstance(train, traits.AddsRouterLoss) and train.router_loss is not None:
            for key, why in routed.items():
                yield key, f"the train slot's router_loss is {why}", "leave out router_loss there"
    divides_layers = getattr(stage, "tensor_parallel", None) is not None
    for model in declarations(stage, plan) if divides_layers else ():
        if isinstance(model, traits.NeedsWholeWeights):
            for message, hint in model.needs_whole_weights():
                yield "tensor_parallel", message, hint
    if getattr(stage, "expert_parallel", None) is not None:
        # Found without importing it.
        spec = importlib.util.find_spec("transformers")
        folders = [] if spec is None else spec.submodule_search_locations or []
        if not any(Path(one, "distributed", "expert_parallel.py").exists() for one in folders):
            message = "needs a newer transformers, whose models divide their experts among ranks"
            yield "expert_parallel", message, "pip install -U transformers"


def _schedule_rows(block: PipelineParallel, stage: Any, plan: PlanView) -> Iterator[Row]:
    """Fields of a schedule that it does not have, and what it does not allow elsewhere."""
    schedule, key = block.schedule, "pipeline_parallel.stages_per_rank"
    if block.stages_per_rank is not None and schedule not in SEVERAL_STAGES:
        hint = f"leave it out, or choose {', '.join(SEVERAL_STAGES)}"
        yield key, f"{schedule} has one stage a rank", hint
    elif schedule in FOLDED and block.per_rank != 2:
        yield key, "ZBVZeroBubble has two stages a rank", ""
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
        message, hint = f"{why} {what} not allow", f"{hint}, or choose another schedule"
        yield "pipeline_parallel.schedule", message, hint


def _config_rows(stage: Any, plan: PlanView) -> Iterator[Row]:
    """Axes that do not divide the model of the recipe."""
    config, model = config_of(stage, plan), hf_model(stage, plan)
    if config is None:
        return
    part = config.get("text_config")
    text = part if isinstance(part, Mapping) else config
    if not (model and model.trust_remote_code and "auto_map" in config):
        yield from _type_rows(stage, types_of(config), model.attention if model else "")
    # The first of the names that the config states; 0 if it states none.
    heads, blocks, experts = (
        next((text[name] for name in names if type(text.get(name)) is int), 0)
        for names in (HEADS, BLOCKS, EXPERTS)
    )
    # Each rank of a tensor-parallel group has a share of the heads, and context-parallel ranks
    # share those of one such rank.
    sizes, among = axis_sizes(stage), 1
    for axis in ("tensor", "context"):
        among *= sizes.get(axis, 1)
        if axis in sizes and heads % among:
            message = f"the model has {heads} attention heads, which do not divide among {among} "
            yield f"{FIELDS[axis]}.size", f"{message}ranks", ""
            break
    if (pipeline := getattr(stage, "pipeline_parallel", None)) is not None:
        if is_multimodal(config):
            message = "the language model of a model of more than text is not divided into stages"
            yield "pipeline_parallel", message, "leave it out"
        if 0 < blocks < (stages := pipeline.size * pipeline.per_rank):
            message = f"the model's {blocks} blocks do not make {stages} pipeline stages"
            yield "pipeline_parallel.size", message, ""
        if config.get("tie_word_embeddings") is True and pipeline.schedule in FOLDED:
            message = f"{pipeline.schedule} puts the first and the last pipeline stage on one "
            message += "rank, and the model's head shares the embedding's weight"
            yield "pipeline_parallel.schedule", message, "choose another schedule"
    field = getattr(stage, "expert_parallel", None)
    if field is not None and field.size > 1 and not has_experts(config):
        yield "expert_parallel", "the model has no experts", "leave it out"
    elif field is not None and experts % field.size:
        message = f"the model's {experts} experts do not divide among {field.size} ranks"
        yield "expert_parallel.size", message, ""


def types_of(config: Mapping[str, Any]) -> set[str]:
    """The types of the model and of its language model, which may be a part of it."""
    kind, part = str(config.get("model_type")), config.get("text_config")
    text = {str(part.get("model_type", f"{kind}_text"))} if isinstance(part, Mapping) else set()
    return {kind, *text}


def _type_rows(stage: Any, kinds: set[str], attention: str) -> Iterator[Row]:
    """Axes that do not divide models of these types, whatever their sizes."""
    fields = {name: getattr(stage, name, None) for name in REFUSED}
    asked = {name: one for name, one in fields.items() if one is not None and one.size > 1}
    for field in asked:
        for kind in kinds & REFUSED[field].keys():
            yield field, f"a {kind} {REFUSED[field][kind]}", "leave it out"
    eager = "context_parallel" in asked and attention == "eager"
    for kind in kinds & SINKS if eager else ():
        message = f"a {kind} has attention sinks, which its eager attention does not divide"
        hint = "set another attention in the model slot, or leave it out"
        yield "context_parallel", message, hint
    unplanned = "tensor_parallel" in asked and not asked["tensor_parallel"].plan
    for kind in kinds & NO_PLAN if unplanned else ():
        message = f"transformers has no plan that divides the layers of a {kind}"
        yield "tensor_parallel", message, "name its layers in tensor_parallel.plan"
    for kind in kinds & NO_BLOCKS if getattr(stage, "units", None) == "block" else ():
        message = f"transformers does not say which modules of a {kind} are its blocks"
        yield "units", message, "name their classes"
