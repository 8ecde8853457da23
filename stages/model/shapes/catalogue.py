"""Families that are described as data."""

from __future__ import annotations

from collections.abc import Mapping

from stages.model.shapes.family import Family
from stages.model.shapes.gemma import GEMMA2, GEMMA3
from stages.model.shapes.gpt2 import GPT2
from stages.model.shapes.gpt_neox import GPT_NEOX
from stages.model.shapes.granite import GRANITE
from stages.model.shapes.olmo2 import OLMO2
from stages.model.shapes.phi3 import PHI3

FAMILIES: Mapping[str, Family] = {
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "olmo2": OLMO2,
    "granite": GRANITE,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
}
"""`model_type` -> what it is."""
