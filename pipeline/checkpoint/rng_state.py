"""The states of a rank's random generators, as bytes of fixed sizes.

Ranks that compute copies of one thing share a stream. With another number of streams the saved ones
have no owners; then new ones start from a digest of the recipe's seed, the step, the stream's
number and the number of streams.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

NAMES = ("torch", "python", "numpy", "cuda")
_PYTHON = "<625I?d"
_NUMPY = "<624Ii?d"


def capture(device: torch.device) -> dict[str, bytes]:
    """States of the generators of torch (of the CPU, and of `device`), Python and numpy."""
    import torch

    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": struct.pack(_PYTHON, *words, gauss is not None, gauss or 0.0),
        "numpy": struct.pack(_NUMPY, *keys, position, bool(has_gauss), cached),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states


def apply(states: Mapping[str, bytes], device: torch.device) -> None:
    """Bring this rank's generators to the captured states; those without one stay unchanged."""
    import torch

    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "python" in states:
        *words, has_gauss, gauss = struct.unpack(_PYTHON, states["python"])
        random.setstate((3, tuple(words), gauss if has_gauss else None))
    if "numpy" in states:
        *keys, position, has_gauss, gauss = struct.unpack(_NUMPY, states["numpy"])
        np.random.set_state(("MT19937", np.array(keys, np.uint32), position, int(has_gauss), gauss))
    if "cuda" in states and device.type == "cuda":
        state = torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8)
        torch.cuda.set_rng_state(state, device)


def reseed(seed: int, step: int, stream: int, streams: int) -> None:
    """Start new streams, a pure function of the arguments."""
    text = f"{seed}/{step}/{stream}/{streams}".encode()
    start_random_streams(int.from_bytes(hashlib.sha256(text).digest()[:8], "little"))


def start_random_streams(number: int) -> None:
    """Start streams of torch, Python and numpy that are a pure function of `number`."""
    import torch

    torch.manual_seed(number % 2**63)
    random.seed(number)
    np.random.seed(number % 2**32)
