"""Output on screen, and the details that it omits."""

from __future__ import annotations

import subprocess
import sys


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
