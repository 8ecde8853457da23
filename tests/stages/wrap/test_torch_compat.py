"""Private parts of torch that we read: a test fails when a version of torch has changed them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

from stages.wrap.torch_compat import no_buffer_sync

ROOT = Path(__file__).parents[3]


def test_ddp_knows_its_buffer_argument() -> None:
    assert no_buffer_sync().keys() <= inspect.signature(DistributedDataParallel).parameters.keys()


PRIVATE = re.compile(r"torch[.\w]*\._[a-z]\w*|\._(cdata|local_tensor)\b", re.IGNORECASE)


@pytest.mark.parametrize("place", ["pipeline/planning/trace", "stages/wrap"])
def test_what_torch_keeps_private_is_used_in_compat_files_alone(place: str) -> None:
    used = {
        (file.name, found[0])
        for file in (ROOT / place).glob("*.py")
        if not file.stem.endswith("compat")
        for found in PRIVATE.finditer(file.read_text("utf-8"))
    }
    assert used == set()
