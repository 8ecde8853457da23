"""Strategies import no libraries of other strategies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, sys
import torch, torch.distributed
from pipeline.distributed.process_group import DistContext
from tests.parity.body import Case, train_case
from tests.support.strategies import having
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
for name, one in having("basic").items():
    if one.use != "wrap.zero":
        case = Case(wrap=one.use, fields=one.fields)
        os.mkdir(name)
        train_case(DistContext(device=torch.device("cpu")), name, case)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_a_torch_strategy_never_imports_deepspeed(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    names = json.loads(said.stdout.splitlines()[-1])
    assert "torch" in names
    assert "deepspeed" not in names
