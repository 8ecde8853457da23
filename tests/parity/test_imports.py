"""A strategy pays for its own libraries only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import torch, torch.distributed
from pipeline.dist import Dist
from tests.parity.body import train_case
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
case = {"wrap": sys.argv[1], "fields": {}, "batching": {}}
train_case(Dist(device=torch.device("cpu")), sys.argv[2], case)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.mark.parametrize("wrap", ["wrap.ddp", "wrap.fsdp"])
def test_a_torch_strategy_never_imports_deepspeed(wrap: str, tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, wrap, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    names = json.loads(said.stdout.splitlines()[-1])
    assert "torch" in names
    assert "deepspeed" not in names
