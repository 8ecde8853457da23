"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `512MiB`, `1.5 GB`. Raises ValueError with a sentence for the user."""
    match = SIZE.fullmatch(text)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size: a number with a unit such as 5GB or 512MiB")
    size = int(float(match[1]) * unit)
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return size
