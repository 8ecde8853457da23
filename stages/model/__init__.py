"""Stages that declare a model, and the door for authors of models and adapters: `model.hf`, and
the base of sources that change another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils import lazily

if TYPE_CHECKING:
    from stages.model.declared import DerivedSource, outline
    from stages.model.hf import HfModel
else:
    __getattr__ = lazily(__name__, __file__)
