"""Whether a stage stays light until it runs: asked in a fresh process, because this one may already
have imported everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def import_violations(value: str, configs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What importing the stage at `value` (`module:Class`) and then checking slots of these fields
    imports too early."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.testing.probe"],
        input=json.dumps({"value": value, "configs": list(configs)}),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield f"importing it in a fresh process failed: {last}"
        return
    for moment, names in json.loads(done.stdout.splitlines()[-1]).items():
        if names:
            yield f"{moment} imports {', '.join(names)} (import them inside run)"
