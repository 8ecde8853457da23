"""Checks of the axes of parallelism against the model's config, where it can be read without a
network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline import PlanView, Problem
from stages.model.compat import is_multimodal
from stages.model.config_checks import BLOCKS, EXPERTS, has_experts
from stages.model.hf import HfModel
from stages.model.read import config_at_hand
from stages.wrap.axes import FIELDS, FOLDED, axis_sizes

HEADS = ("num_attention_heads", "n_head", "n_heads")


def config_problems(stage: Any, plan: PlanView) -> Iterator[Problem]:
    """Axes that do not divide the model of the recipe."""
    model = plan.find(HfModel)
    config = None if model is None else config_at_hand(model)
    if config is None:
        return
    part = config.get("text_config")
    text = part if isinstance(part, Mapping) else config
    yield from _head_problems(axis_sizes(stage), _count(text, HEADS))
    tied = config.get("tie_word_embeddings") is True
    yield from _block_problems(stage, text, tied=tied, more_than_text=is_multimodal(config))
    yield from _expert_problems(stage, config, _count(text, EXPERTS))


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


def _expert_problems(stage: Any, config: Mapping[str, Any], experts: int) -> Iterator[Problem]:
    field = getattr(stage, "expert_parallel", None)
    if field is None or field.size == 1:
        return
    if not has_experts(config):
        message = "the model has no experts"
        yield Problem(key="expert_parallel", message=message, hint="leave it out")
    elif experts % field.size:
        message = f"the model's {experts} experts do not divide among {field.size} ranks"
        yield Problem(key="expert_parallel.size", message=message)
