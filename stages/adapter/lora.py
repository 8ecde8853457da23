"""The stage `adapter.lora`."""

from __future__ import annotations

import fnmatch
import importlib.util
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from pipeline import Context, Engine, ModelSource, PlanView, Problem, StageError
from pipeline.utils import closest, parse_json, read_whole
from stages.model.declared import DerivedSource

if TYPE_CHECKING:
    from stages.adapter.source import AdaptedSource
    from stages.weights.change import Change

QuantType = Literal["nf4", "fp4"]
"""The 16 values of 4 bits: quantiles of a normal distribution, or floating-point numbers."""


class AdaptedModel(DerivedSource):
    """A model whose own weights are frozen, with an adapter that is trained."""

    quantize: QuantType | None
    """The 4-bit type of the model's own linear layers; None if they are not quantized."""

    @property
    @abstractmethod
    def trained(self) -> Sequence[str]:
        """Names of the trained parameters, which are the adapter."""

    @abstractmethod
    def changes_to_file(self) -> Sequence[Change]:
        """The changes that turn the trained tensors into those of peft's file."""

    @abstractmethod
    def save_config(self, folder: Path) -> None:
        """Write peft's configuration. Raises StageError for a training that an adapter cannot
        express."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Train low-rank updates of linear layers and experts instead of the model itself (Hu et al.
    2021, LoRA).

    The model's own weights are frozen: they are held in the compute dtype, without master weights
    and optimizer state, and checkpoints leave them out. `export.safetensors` writes the model with
    the updates merged into it, `export.adapter` only the updates.
    """

    rank: Annotated[int, Gt(0)] = 16
    """Rank of the updates."""
    alpha: Annotated[float, Gt(0)] = 32.0
    """Updates are scaled by alpha / rank."""
    scaling: Literal["standard", "rslora"] = "standard"
    """`rslora` scales by alpha / sqrt(rank) instead, which keeps large ranks learning
    (Kalajdzievski 2023)."""
    dora: bool = False
    """Train the length of each weight row apart from its direction (Liu et al. 2024, DoRA)."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of an update's inputs that is dropped in training."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get an update: ends of their names (`q_proj`, `mlp.up_proj`), or all but
    the head. A warning names those that get none."""
    target_parameters: tuple[str, ...] | None = None
    """Stacked weights of experts that get an update, one for each expert: ends of their names
    (`mlp.experts.down_proj`), as in peft. By default all of them if `targets` is all-linear, but
    those that `train_also` trains; none with `dora`, which peft does not have for them."""
    quantize: QuantType | None = None
    """Hold the weights of all linear layers but the head in 4 bits, by bitsandbytes (Dettmers et
    al. 2023, QLoRA). The trained, merged and exported model is the one with these weights."""
    train_also: tuple[str, ...] = ()
    """Patterns (`lm_head.*`, `*norm.weight`) of the model's own parameters that are trained
    in full, in addition to the updates."""
    start_from: str | None = None
    """Folder with an adapter saved by this program or by peft, to start from. It must have these
    settings, and should have been trained on weights in the same precision."""

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
        if self.misses_experts and not any("expert" in name for name in self.train_also):
            yield from _skipped_experts(self, plan)
        yield from _unmatched_targets(self, plan)
        if self.targets == () and not self.target_parameters:
            yield Problem(key="targets", message="names no layer", hint="write all-linear")
        yield from _frozen_random(self, plan)
        if self.start_from is not None:
            for message, hint in differences(self, Path(self.start_from).expanduser()):
                yield Problem(key="start_from", message=message, hint=hint)

    def needs_whole_weights(self) -> Iterator[tuple[str, str]]:
        if self.dora:
            message = (
                "DoRA takes the lengths of whole rows of weights, and ranks have parts of them"
            )
            yield message, "set dora: false"
        if self.quantize is not None:
            message = "packed weights of 4 bits are not divided by rows and columns"
            yield message, "leave out quantize"

    @property
    def misses_experts(self) -> bool:
        """Whether experts get no update."""
        if self.target_parameters is None:
            return self.dora or self.targets != "all-linear"
        return not self.target_parameters

    def run(self, ctx: Context, model: ModelSource) -> AdaptedModel:
        source = self.declared(model, seed=ctx.seed)
        source.log_summary(ctx.log)
        return source

    def declared(self, model: ModelSource, *, seed: int) -> AdaptedSource:
        """The model with its adapter, without logging."""
        from stages.adapter.nf4_linear import PackedSource
        from stages.adapter.source import AdaptedSource

        base = model if self.quantize is None else PackedSource(model, self.quantize)
        return AdaptedSource(self, base, seed=seed)


def _frozen_random(stage: Lora, plan: PlanView) -> Iterator[Problem]:
    """Yield a mistake for weights that are drawn at random, that the data train on, and that stay
    frozen: rows of the vocabulary for new tokens, and `new_weights`."""
    from stages.model.config_checks import hf_model
    from stages.model.frozen_checks import new_rows, tables

    model = hf_model(stage, plan)
    if model is None:
        return
    for new in model.new_weights:
        if not _is_named(new, stage.train_also):
            message = f"{new}, which the model slot's new_weights draw at random, stay frozen"
            yield Problem(key="train_also", message=message, hint=f"add {new}")
    try:
        rows, named = new_rows(model), tables(model)
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
    return any(not name or name == each or fnmatch.fnmatchcase(name, each) for each in patterns)


def _skipped_experts(stage: Lora, plan: PlanView) -> Iterator[Problem]:
    """Yield a warning if the recipe's model has experts, by its config."""
    from stages.model.config_checks import config_of, has_experts

    if has_experts(config_of(stage, plan) or {}):
        key, why = "target_parameters", "`targets` are linear layers"
        hint = "target_parameters: [experts.gate_up_proj, experts.down_proj] includes them"
        if stage.dora:
            key, why = "dora", "DoRA has none for stacked weights"
            hint = "train_also: ['*.experts.*'] trains them as a whole"
        message = f"experts get no update: {why}"
        yield Problem(key=key, message=message, hint=hint, warning=True)


def _unmatched_targets(stage: Lora, plan: PlanView) -> Iterator[Problem]:
    """Yield a mistake for each target with a name that the model's source does not have. A name
    that it has can still be that of no linear layer, which the run finds when it builds the
    model."""
    from stages.model.compat import is_multimodal
    from stages.model.config_checks import config_of, hf_model
    from stages.model.source_text_compat import lacks_name, linear_names

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


def differences(stage: Lora, folder: Path) -> Iterator[tuple[str, str]]:
    """Reasons why the stage cannot go on from the adapter in a folder: a message and a hint
    each."""
    from stages.adapter.compat import CONFIG, WEIGHTS

    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        yield f"no {' and no '.join(missing)} in {folder}", ""
        return
    try:
        saved: Any = parse_json(read_whole(folder / CONFIG))
    except (OSError, ValueError) as error:
        yield f"{folder / CONFIG} cannot be read: {error}", ""
        return
    if not isinstance(saved, dict) or saved.get("peft_type") != "LORA":
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
