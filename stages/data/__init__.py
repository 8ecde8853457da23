"""Stages that turn files into samples, and the door for authors of one: what they all ask a
tokenizer for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils import lazily

if TYPE_CHECKING:
    from stages.data.tokenize import pad_id as pad_id
    from stages.data.tokenize import tokenizer_identity as tokenizer_identity
else:
    __getattr__, __dir__ = lazily(__name__, __file__)
