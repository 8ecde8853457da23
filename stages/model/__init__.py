"""Stages that declare a model, and the door for authors of models and adapters: `model.hf`, and
the base of sources that change another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils import lazily

if TYPE_CHECKING:
    from stages.model.declared import DerivedSource as DerivedSource
    from stages.model.declared import outline as outline
    from stages.model.hf import HfModel as HfModel
    from stages.model.hf import TrainedModel as TrainedModel
else:
    __getattr__, __dir__ = lazily(__name__, __file__)
