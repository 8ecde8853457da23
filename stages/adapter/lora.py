"""The stage `adapter.lora`, and the mistakes in it that show before anything starts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import Context, Engine, ModelSource, PlanView, Problem, StageError
from pipeline.utils import closest, expanded
from stages.adapter.compat import CONFIG, WEIGHTS
from stages.adapter.settings import AdaptedModel as AdaptedModel
from stages.adapter.settings import LoraSettings
from stages.adapter.settings import QuantType as QuantType
from stages.model.compat import is_multimodal, type_code
from stages.model.config_checks import config_of, has_experts, hf_model
from stages.model.declared import matches
from stages.model.files import read_json
from stages.model.weight_checks import new_rows, vocabulary_tables

if TYPE_CHECKING:
    from stages.adapter.source import AdaptedSource


@dataclass(frozen=True, kw_only=True)
class Lora(LoraSettings):
    """Train low-rank updates of linear layers and experts instead of the model itself (Hu et al.
    2021, LoRA).

    The model's own weights are frozen: they are held in the compute dtype, without master weights
    and optimizer state, and checkpoints leave them out. `export.safetensors` writes the model with
    the updates merged into it, `export.adapter` only the updates.
    """

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if importlib.util.find_spec("peft") is None:
            yield Problem(message="needs peft", hint="pip install 'pipetrain[adapter]'")
        builder = plan.too_late(self, Engine)
        if builder is not None:
            message = f"stands after slot `{builder}`, which builds the model, and changes nothing"
            yield Problem(message=message, hint=f"move it before slot `{builder}`")
        if self.quantize is not None and importlib.util.find_spec("bitsandbytes") is None:
            hint = "pip install 'pipetrain[bitsandbytes]'"
            yield Problem(key="quantize", message="needs bitsandbytes", hint=hint)
        if self.dora and self.target_parameters:
            message = "DoRA has no updates of stacked weights of experts"
            yield Problem(key="target_parameters", message=message, hint="set dora: false")
        trained = not self.misses_experts or any("expert" in name for name in self.train_also)
        if not trained and has_experts(config_of(self, plan) or {}):
            key, why = "target_parameters", "`targets` are linear layers"
            hint = "target_parameters: [experts.gate_up_proj, experts.down_proj] includes them"
            if self.dora:
                key, why = "dora", "DoRA has none for stacked weights"
                hint = "train_also: ['*.experts.*'] trains them as a whole"
            message = f"experts get no update: {why}"
            yield Problem(key=key, message=message, hint=hint, warning=True)
        yield from _unmatched_targets(self, plan)
        if self.targets == () and not self.target_parameters:
            yield Problem(key="targets", message="names no layer", hint="write all-linear")
        yield from _frozen_random(self, plan)
        if self.start_from is not None:
            for message, hint in differences(self, expanded(self.start_from)):
                yield Problem(key="start_from", message=message, hint=hint)

    def needs_whole_weights(self) -> Iterator[tuple[str, str]]:
        if self.dora:
            why = "DoRA takes the lengths of whole rows of weights, and ranks have parts of them"
            yield why, "set dora: false"
        if self.quantize is not None:
            why = "packed weights of 4 bits are not divided by rows and columns"
            yield why, "leave out quantize"

    def run(self, ctx: Context, model: ModelSource) -> AdaptedModel:
        from stages.adapter.injection import log_summary

        source = self.declared(model, seed=ctx.seed)
        log_summary(source, ctx.log)
        return source

    def declared(self, model: ModelSource, *, seed: int) -> AdaptedSource:
        """Return the model with its adapter, without logging."""
        from stages.adapter.nf4 import PackedSource
        from stages.adapter.source import AdaptedSource

        base = model if self.quantize is None else PackedSource(model, self.quantize)
        return AdaptedSource(self, base, seed=seed)


def _unmatched_targets(stage: Lora, plan: PlanView) -> Iterator[Problem]:
    """A mistake for each target with a name that the model's source does not have. A name that it
    has may still name no linear layer, which the run finds when it builds the model."""
    config, model = config_of(stage, plan), hf_model(stage, plan)
    foreign = model is not None and model.trust_remote_code
    if config is None or foreign or is_multimodal(config):
        return
    kind = str(config.get("model_type"))
    code = type_code(kind)
    if not code or "AutoModel" in code:  # models that are made by other files than the type's
        return
    linear = () if isinstance(stage.targets, str) else stage.targets
    stacked = stage.target_parameters or ()
    named = [("targets", one) for one in linear] + [("target_parameters", one) for one in stacked]
    for key, target in named:
        parts = [part for part in target.split(".") if part.isidentifier()]
        if not all(re.search(rf"\b{part}\b", code) for part in parts):
            what = "linear layer" if key == "targets" else "weight"
            assigned = re.findall(r"self\.(\w+) = (?:nn\.Linear|Conv1D|\w+Linear)\(", code)
            names = sorted(set(assigned) - {"lm_head"})
            near = closest(target.rpartition(".")[2], names)
            asked = f"did you mean `{near}`? " if near else ""
            yield Problem(
                key=key,
                message=f"no {what} of a {kind} has a name that ends in {target!r}",
                hint=f"{asked}linear layers are called {', '.join(names)}" if names else "",
            )


def _frozen_random(stage: Lora, plan: PlanView) -> Iterator[Problem]:
    """A mistake for weights that are drawn at random, that the data train on, and that stay frozen:
    rows of the vocabulary for new tokens, and `new_weights`."""
    model = hf_model(stage, plan)
    if model is None:
        return
    for new in model.new_weights:
        if not _is_named(new, stage.train_also):
            message = f"{new}, which the model slot's new_weights draw at random, stay frozen"
            yield Problem(key="train_also", message=message, hint=f"add {new}")
    try:
        rows, named = new_rows(model), vocabulary_tables(model)
    except StageError as error:  # of the tokenizer's files
        yield Problem(message=str(error))
        return
    lacking = [table for table, name in named.items() if not _is_named(name, stage.train_also)]
    if rows and lacking:
        names = [name for name in named.values() if name]
        hint = f"train_also: {names} trains {'them' if len(names) > 1 else 'it'} as a whole"
        yield Problem(
            key="train_also",
            message=f"{rows} rows of the vocabulary are new and random, and stay frozen while the "
            f"tokenizer uses them: train_also names no {' and no '.join(lacking)}",
            hint=hint if names else "",
        )


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names a weight; any may name one whose name is not known (empty)."""
    return name in patterns or matches(name, patterns) or (not name and bool(patterns))


def differences(stage: LoraSettings, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield why the stage cannot continue from a saved adapter: a message and a hint each."""
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        yield f"no {' and no '.join(missing)} in {folder}", ""
        return
    try:
        saved = read_json(folder / CONFIG)
    except StageError as error:
        yield str(error), ""
        return
    if saved.get("peft_type") != "LORA":
        yield f"{folder / CONFIG} is not the configuration of a LoRA", ""
        return
    for key in ("rank_pattern", "alpha_pattern"):
        if saved.get(key):
            yield f"its {key} sets options per layer, which adapter.lora cannot", ""
    settings = {
        "rank": saved.get("r"),
        "alpha": saved.get("lora_alpha"),
        "scaling": "rslora" if saved.get("use_rslora") else "standard",
        "dora": bool(saved.get("use_dora")),
    }
    for field, value in settings.items():
        own = getattr(stage, field)
        if value != own:
            yield f"was trained with {field}: {value}, this is {own}", f"set {field}: {value}"
