"""How large packed weights are, without torch."""

from __future__ import annotations

import math

BLOCK = 64
"""Elements that share a scale: the paper's block size, and bitsandbytes' default."""

SCALE = 4
"""Bytes of one, in fp32."""


def code_bytes(elements: int) -> int:
    """Bytes of the codes, rounded up to where a scale can begin."""
    return math.ceil(elements / (2 * SCALE)) * SCALE


def packed_bytes(elements: int) -> int:
    """Bytes of a packed weight: 4.5 bits an element, rounded up."""
    return code_bytes(elements) + math.ceil(elements / BLOCK) * SCALE
