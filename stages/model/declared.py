"""A `model.hf` slot's model for planning: from its config alone, as shallow as asked for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pipeline.artifacts import ModelSource
from pipeline.errors import StageError
from stages.model.config import config_of_files, config_of_recipe
from stages.model.fit import Allowed
from stages.model.open import local_files
from stages.model.paths import is_local
from stages.model.read import read_config
from stages.model.source import HfSource, Training

if TYPE_CHECKING:
    from pipeline.planning.planner import Extent
    from pipeline.stage import Context
    from stages.model.hf import HfModel


def declared_source(stage: HfModel, ctx: Context, extent: Extent) -> ModelSource:
    """The declared model without compiled blocks, 8 bits and fused kernels, which need values or a
    GPU. Raises StageError for a config that cannot be had or used."""
    config = _config(stage)
    if stage.vocab_size is not None:
        config.get_text_config().vocab_size = stage.vocab_size
    if extent.blocks is not None:
        cut(config.get_text_config(), extent.blocks)
    return HfSource(
        name=stage.path or "random initialisation",
        config=config,
        files=None,
        tokenizer_files=None,
        seed=ctx.seed,
        random=True,
        allowed=Allowed(new=(), unused=()),
        resized=False,
        attention=stage.attention,
        training=Training(checkpointing=stage.activation_checkpointing),
        trust_remote_code=stage.trust_remote_code,
        log=ctx.log,
    )


def _config(stage: HfModel) -> Any:
    if stage.config is not None:
        return config_of_recipe(stage.config)
    assert stage.path is not None
    if is_local(stage.path):
        files = local_files(stage.path, stage.gguf_file)
        return config_of_files(files, trust_remote_code=stage.trust_remote_code)
    return config_of_recipe(read_config(dataclasses.replace(stage, vocab_size=None)))


def cut(config: Any, blocks: int) -> None:
    """Leave the first so many blocks, and what the config lists of each block."""
    count = getattr(config, "num_hidden_layers", None)
    if count is None:
        raise StageError(
            f"a {config.model_type} cannot be planned: its config has no num_hidden_layers",
            hint="`pipe bench` measures what it takes",
        )
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(config, name, value[:blocks])
    config.num_hidden_layers = blocks
