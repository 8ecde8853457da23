"""The states of a rank's random generators, as bytes of fixed sizes.

With another number of ranks the saved streams have no owners; every rank then starts new ones from
a digest of the recipe's seed, the step, its rank and the number of ranks.
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
    """State of the generators of torch (of the CPU, and of `device`), Python and numpy."""
    import torch

    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": _python_state(),
        "numpy": _numpy_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states


def apply(states: Mapping[str, bytes], device: torch.device) -> None:
    """Put this rank's generators where `capture` found them. What is missing stays as it is."""
    import torch

    if "torch" in states:
        torch.set_rng_state(_tensor(states["torch"]))
    if "python" in states:
        *words, some, gauss = struct.unpack(_PYTHON, states["python"])
        random.setstate((3, tuple(words), gauss if some else None))
    if "numpy" in states:
        *keys, position, some, gauss = struct.unpack(_NUMPY, states["numpy"])
        np.random.set_state(("MT19937", np.array(keys, np.uint32), position, int(some), gauss))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)


def derive(seed: int, step: int, rank: int, world_size: int) -> None:
    """Start new streams, a pure function of the arguments."""
    text = f"{seed}/{step}/{rank}/{world_size}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    start(number)


def start(number: int) -> None:
    """Start streams of torch, Python and numpy that are a pure function of `number`."""
    import torch

    torch.manual_seed(number % 2**63)
    random.seed(number)
    np.random.seed(number % 2**32)


def _python_state() -> bytes:
    version, words, gauss = random.getstate()
    assert version == 3
    return struct.pack(_PYTHON, *words, gauss is not None, gauss or 0.0)


def _numpy_state() -> bytes:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    keys, position = state["state"]["key"], state["state"]["pos"]
    return struct.pack(_NUMPY, *keys.tolist(), position, bool(state["has_gauss"]), state["gauss"])


def _tensor(data: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
