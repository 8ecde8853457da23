"""Child processes that run a module of the project: each is given one JSON message in memory."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from pipeline.utils.files import anonymous_file, read_all
from pipeline.utils.process_tree import own_module


def start_child(
    module: str,
    message: Any,
    *shown: str,
    pass_fds: Sequence[int] = (),
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a module of the project, which finds `message` by `received`. `ps` shows the arguments
    `shown`, such as the run's folder. `options` are Popen's. Raises OSError."""
    descriptor = anonymous_file("message")
    try:
        os.write(descriptor, json.dumps(message).encode())
        return subprocess.Popen(
            own_module(module, str(descriptor), *shown),
            pass_fds=[*pass_fds, descriptor],
            **options,
        )
    finally:
        os.close(descriptor)


def received(argument: str) -> Any:
    """The message to this process, whose first argument is `argument`."""
    descriptor = int(argument)
    try:
        return json.loads(read_all(descriptor))
    finally:
        os.close(descriptor)
