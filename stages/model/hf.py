"""The stage `model.hf`: a causal language model of the transformers library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline import Context, ModelSource, PlanView, Problem, StageError
from pipeline.utils import HubName, require_code_trust
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
        yield from checks.beside_problems(self, plan)
        yield from weight_checks.head_problems(self)
        yield from weight_checks.frozen_problems(self)
        yield from checks.speed_problems(self, plan)
        yield from config_checks.too_long(self, plan)
        yield from checks.multimodal_notes(self)

    def config_at_hand(self) -> Mapping[str, Any] | None:
        """Return the config, if it can be read without a network."""
        from stages.model.read import config_at_hand

        return config_at_hand(self)

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
        source.require_frozen()
        return source
