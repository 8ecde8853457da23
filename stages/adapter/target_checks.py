"""Targets of an adapter that match nothing in the recipe's model, as far as its architecture's
source says so. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline import PlanView, Problem
from pipeline.utils import closest
from stages.model.compat import is_multimodal
from stages.model.config_checks import config_of, hf_model
from stages.model.source_text_compat import lacks_name, linear_names

if TYPE_CHECKING:
    from stages.adapter.lora import Lora


def unmatched_targets(stage: Lora, plan: PlanView) -> Iterator[Problem]:
    """The problem of each target with a name that the model's source does not have. A name that it
    has can still be that of no linear layer, which the run finds when it builds the model."""
    config, model = config_of(stage, plan), hf_model(stage, plan)
    foreign = model is not None and model.trust_remote_code
    if config is None or foreign or is_multimodal(config):
        return
    kind = str(config.get("model_type"))
    linear = () if isinstance(stage.targets, str) else stage.targets
    for key, targets in (("targets", linear), ("target_parameters", stage.target_parameters or ())):
        for target in targets:
            unknown = [part for part in target.split(".") if lacks_name(kind, part)]
            if [part for part in unknown if part.isidentifier()]:
                what = "linear layer" if key == "targets" else "weight"
                names = linear_names(kind)
                near = closest(target.rpartition(".")[2], names)
                asked = f"did you mean `{near}`? " if near else ""
                yield Problem(
                    key=key,
                    message=f"no {what} of a {kind} has a name that ends in {target!r}",
                    hint=f"{asked}linear layers are called {', '.join(names)}" if names else "",
                )
