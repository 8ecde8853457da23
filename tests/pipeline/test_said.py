"""What is said on screen, and what is left unsaid."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline.forecast.after import FILE, WHAT, _tell


def test_what_libraries_tell_each_other_is_not_on_a_command_s_screen() -> None:
    program = (
        "import logging, sys; from pipeline.cli import main\n"
        "try: main(['stages', 'optimizer.lion'])\n"
        "except SystemExit: pass\n"
        "logging.getLogger('torchao').warning('Failed to load x.so')\n"
        "logging.getLogger('another').warning('heard')"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stderr == "heard\n"


@pytest.mark.parametrize(
    ("device", "line"),
    [
        ("cpu", f"memory of the fullest rank: 1.00 GiB ({WHAT['cpu']})"),
        (
            "cuda",
            "memory of the fullest rank: 2.00 GiB predicted (backward), 1.00 GiB measured "
            "(tensors on a GPU): -50.0 %",
        ),
    ],
)
def test_a_prediction_is_compared_where_it_is_one_of_tensors(
    device: str, line: str, tmp_path: Any
) -> None:
    said: list[str] = []
    ctx: Any = SimpleNamespace(
        run_dir=tmp_path,
        dist=SimpleNamespace(device=SimpleNamespace(type=device)),
        log=SimpleNamespace(info=lambda text, *values: said.append(text % values)),
    )
    found = {
        "predicted_bytes": 2 << 30, "measured_bytes": 1 << 30, "phase": "backward",
        "what": WHAT[device],
    }  # fmt: skip
    _tell(found, ctx)
    assert said == [line]
    assert (tmp_path / FILE).is_file()
