"""The stage `adapter.lora`."""

from __future__ import annotations

import importlib.util
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from pipeline.contracts.engine import Engine
from pipeline.contracts.model import ModelSource
from pipeline.contracts.stage import Context, PlanView
from pipeline.errors import Problem
from stages.model.declared import DerivedSource

FourBits = Literal["nf4", "fp4"]
"""The 16 values that 4 bits stand for: quantiles of a normal distribution, or floating-point
numbers."""


class AdaptedModel(DerivedSource):
    """A model whose own weights stay as they are, with an adapter that is trained."""

    @property
    @abstractmethod
    def trained(self) -> Sequence[str]:
        """Names of the parameters that are trained, all of the adapter."""

    @property
    @abstractmethod
    def quantize(self) -> FourBits | None:
        """In which 4 bits the model's own linear layers are, if they are."""

    @abstractmethod
    def save_config(self, folder: Path) -> None:
        """Write what peft needs beside the weights. Raises StageError for a training that an
        adapter cannot express."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Train low-rank updates of linear layers instead of the model itself (Hu et al. 2021, LoRA).

    The model's own weights are frozen: they are held in the compute dtype, without master weights
    and optimizer state, and checkpoints leave them out. `export.safetensors` writes the model with
    the updates merged into it, `export.adapter` the updates alone.
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
    """Which linear layers get an update: ends of their names (`q_proj`, `mlp.up_proj`), or all but
    the head. Experts that are one tensor are no linear layers."""
    quantize: FourBits | None = None
    """Hold the weights of all linear layers but the head in 4 bits, by bitsandbytes (Dettmers et
    al. 2023, QLoRA). What is trained, merged and exported is the model with these weights."""
    train_also: tuple[str, ...] = ()
    """Patterns (`lm_head.*`, `*norm.weight`) of the model's own parameters that are trained as a
    whole beside the updates."""
    start_from: str | None = None
    """Folder with an adapter that was saved by this program or by peft, to go on from. It must have
    these settings, and should have been trained on weights in the same precision."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if importlib.util.find_spec("peft") is None:
            yield Problem(message="needs peft", hint="pip install 'pipetrain[adapter]'")
        builder = plan.before(self, Engine)
        if builder is not None:
            yield Problem(
                message=f"comes behind slot `{builder}`, which builds the model, and would change "
                "nothing",
                hint="move it up, behind the model slot",
            )
        if self.quantize is not None and importlib.util.find_spec("bitsandbytes") is None:
            yield Problem(
                key="quantize",
                message="needs bitsandbytes",
                hint="pip install 'pipetrain[bitsandbytes]'",
            )
        if self.targets == "all-linear" and not any("expert" in name for name in self.train_also):
            from stages.adapter.experts import skipped_experts

            yield from skipped_experts(plan)
        if self.targets == ():
            yield Problem(key="targets", message="names no layer", hint="write all-linear")
        if self.start_from is not None:
            yield from self._start_problems(Path(self.start_from).expanduser())

    def _start_problems(self, folder: Path) -> Iterator[Problem]:
        from stages.adapter.compat import CONFIG, WEIGHTS

        missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
        for name in missing:
            yield Problem(key="start_from", message=f"no {name} in {folder}")
        if not missing:
            for message, hint in differences(self, folder / CONFIG):
                yield Problem(key="start_from", message=message, hint=hint)

    def run(self, ctx: Context, model: ModelSource) -> AdaptedModel:
        from stages.adapter.source import AdaptedSource

        source: AdaptedSource = self.declared(model, seed=ctx.seed)
        source.tell(ctx.log)
        return source

    def declared(self, model: ModelSource, *, seed: int) -> Any:
        """The model with its adapter, of which nothing is said yet."""
        from stages.adapter.nf4_linear import QuantisedSource
        from stages.adapter.source import AdaptedSource

        base = model if self.quantize is None else QuantisedSource(model, self.quantize)
        return AdaptedSource(self, base, seed=seed)


def differences(stage: Lora, config: Path) -> Iterator[tuple[str, str]]:
    """Where peft's `config` file means another function than `stage`: what, and what to do."""
    try:
        saved: Any = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        yield f"{config} cannot be read: {error}", ""
        return
    if not isinstance(saved, dict) or saved.get("peft_type") != "LORA":
        yield f"{config} is of no LoRA", ""
        return
    for key in ("rank_pattern", "alpha_pattern"):
        if saved.get(key):
            yield f"its {key} gives layers settings of their own, which adapter.lora has not", ""
    scaling = "rslora" if saved.get("use_rslora") else "standard"
    told = {
        "rank": saved.get("r"),
        "alpha": saved.get("lora_alpha"),
        "scaling": scaling,
        "dora": bool(saved.get("use_dora")),
    }
    for field, value in told.items():
        own = getattr(stage, field)
        if value != own:
            yield f"was trained with {field}: {value}, this is {own}", f"set {field}: {value}"
