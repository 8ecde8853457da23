"""Readers of named tensors: what a file of each kind holds, and views on other readers. The door
is for authors of adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils import lazily

if TYPE_CHECKING:
    from stages.weights.views import JoinedReader as JoinedReader
else:
    __getattr__, __dir__ = lazily(__name__, __file__)
