"""A rank that fails ends the run, says why last, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Pipe
