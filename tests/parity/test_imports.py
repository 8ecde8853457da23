"""A strategy pays for its own libraries only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline.dist import Dist
from tests.parity.body import train_case
from tests.parity.test_parity import case
from tests.support.processes import run_ranks


def imported(dist: Dist, folder: str, config: dict[str, Any]) -> list[str]:
    train_case(dist, folder, config)
    return sorted({name.partition(".")[0] for name in sys.modules})


def test_a_torch_strategy_never_imports_deepspeed(tmp_path: Path) -> None:
    for wrap in ("wrap.ddp", "wrap.fsdp"):
        names = run_ranks(imported, 1, str(tmp_path / wrap), case(wrap, "dcp"))[0]
        assert "torch" in names
        assert "deepspeed" not in names
