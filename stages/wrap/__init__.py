"""Strategies, and the door for authors of one: what plain-torch strategies share.

Siblings do not import each other; what they share is in files without a strategy's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils import lazily

if TYPE_CHECKING:
    from stages.wrap.build import build_module as build_module
    from stages.wrap.build import declared_facts as declared_facts
    from stages.wrap.build import verify_engine as verify_engine
    from stages.wrap.optimizer_state import make_optimizers as make_optimizers
    from stages.wrap.torch_compat import prime_buckets as prime_buckets
    from stages.wrap.torch_engine import ModulePasses as ModulePasses
    from stages.wrap.torch_engine import TorchEngine as TorchEngine
else:
    __getattr__, __dir__ = lazily(__name__, __file__)
