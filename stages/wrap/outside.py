"""What an engine makes outside of a trace's tensors without values, in one place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily


def with_values() -> AbstractContextManager[Any]:
    """Inside, tensors are real in a trace too: those that say which ranks there are, and the
    buffers of a model without memory."""
    return unset_fake_temporarily()
