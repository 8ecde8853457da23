"""Training loops, and the door for authors of one: a stage that inherits from `TrainCausalLm` has
another objective, by its methods `objective` and `measure`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils import lazily

if TYPE_CHECKING:
    from stages.train.causal_lm import TrainCausalLm as TrainCausalLm
else:
    __getattr__, __dir__ = lazily(__name__, __file__)
