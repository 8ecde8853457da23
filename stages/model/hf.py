"""The stages `model.hf`, a causal language model of the transformers library, and `model.trained`,
the model of a training, for a further one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pipeline import Context, ModelSource, PlanView, Problem, StageError, TrainedRun
from pipeline.utils import HubName, require_code_trust
from stages.consolidate.stream import average_problems
from stages.fields import result_problems
from stages.model.settings import ActivationCheckpointing as ActivationCheckpointing
from stages.model.settings import Compile as Compile
from stages.model.settings import Fp8 as Fp8
from stages.model.settings import HfSettings


@dataclass(frozen=True, kw_only=True)
class HfModel(HfSettings):
    """Declare a causal language model: pretrained (folder, hub, GGUF file) or randomly initialised.

    Exactly one of `path` and `config` is given. Nothing is loaded here; a wrap stage builds the
    module and fills it.
    """

    for_export: ClassVar[Mapping[str, str]] = {"attention": "eager"}
    """Fields that `pipe export` sets: it trains nothing, so it needs no kernels."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        from stages.model import checks, config_checks, weight_checks

        yield from checks.problems(self)
        yield from checks.not_read_problems(self, plan)
        yield from weight_checks.head_problems(self)
        yield from weight_checks.frozen_problems(self)
        yield from checks.speed_problems(self, plan)
        yield from config_checks.too_long(self, plan)
        yield from checks.multimodal_notes(self)

    @property
    def recomputes_operations(self) -> bool:
        """Whether backward repeats single operations of forward."""
        settings = self.activation_checkpointing
        return settings is not None and settings.keep != "nothing"

    def hub_names(self) -> Iterator[HubName]:
        """Yield the model and the tokenizer, if they are of the hub."""
        from stages.model.files import HUB_ID, is_local

        keys = {"path": "revision", "tokenizer": "tokenizer_revision"}
        for name, key in keys.items():
            repo, revision = getattr(self, name), getattr(self, key)
            if repo is not None and not is_local(repo) and HUB_ID.fullmatch(repo):
                yield HubName(kind="model", repo=repo, revision=revision, named_by=name, key=key)

    def run(self, ctx: Context) -> ModelSource:
        from stages.model.checks import foreign_code
        from stages.model.config_checks import sees_later_tokens
        from stages.model.source import open_source

        for _, origin in foreign_code(self):
            require_code_trust(origin)
        source = open_source(self, ctx)
        if unsuited := sees_later_tokens(source.config.to_dict()):
            raise StageError(unsuited[0], hint=unsuited[1])
        if self.frozen:
            source.require_frozen()
        return source


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Take the model of the training before, for a further training in the same recipe.

    The weights are streamed out of its checkpoint, adapters merged; nothing is written. The
    further training is the same, bit for bit, as one that starts from an export in `dtype`. The
    model slot before says how the model is built and trained (attention, activation checkpointing,
    compile), and which tokenizer it has.
    """

    dtype: Literal["fp32", "bf16", "fp16", "source"] = "bf16"
    """Dtype to which the trained weights are rounded, as `export.safetensors` does; `fp32` keeps
    master weights as they are, `source` the dtype of each tensor in the model slot."""
    weights: Literal["model", "ema"] = "model"
    """The trained weights, or their exponential moving average, where the training kept one (slot
    `average.ema`)."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from average_problems(self.weights, plan.producer(self, TrainedRun), plan)
        yield from result_problems(self, plan)

    def run(self, ctx: Context, trained: TrainedRun, model: ModelSource) -> ModelSource:
        """Return the model of a finished training of `model`. Raises StageError for another model,
        and for other weights than an adapter was trained on."""
        from stages.model.as_exported import TrainedSource, require_same_base

        then = trained.progress.lineage.get("model")
        if then not in (None, model.fingerprint) and "model" not in ctx.accept:
            raise StageError(
                f"{model.name} is not the model that was trained: it was {then[:12]}, is "
                f"{model.fingerprint[:12]}",
                hint="the slot takes the latest model before it: put it after the training that "
                "it is to continue, and another model after it",
            )
        require_same_base(ctx, model, trained)
        average = None if self.weights == "model" else self.weights
        ctx.log.info("the model of step %d, from %s", trained.progress.step, trained.checkpoint)
        return TrainedSource(model, trained, ctx, self.dtype, average)

    run_dry = run
