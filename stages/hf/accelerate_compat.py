"""Private names of accelerate: its launcher and its process-wide state.

`accelerate launch` turns a configuration file into environment variables, from which an Accelerator
takes everything. The same is done here without the launch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def launch_environment(config: Path, procs: int) -> dict[str, str]:
    """The variables that `accelerate launch --config_file CONFIG` sets for its processes."""
    given = ["--config_file", str(config), "--num_processes", str(procs), "recipe"]
    arguments = launch_command_parser().parse_args(given)
    arguments, _, _ = _validate_launch_command(arguments)
    arguments.num_machines, arguments.main_process_port = 1, 0  # this run's own launcher decides
    if arguments.use_fsdp or arguments.multi_gpu:
        variables = prepare_multi_gpu_env(arguments)
    else:
        _, variables = prepare_simple_launcher_cmd_env(arguments)
    return {key: value for key, value in variables.items() if key.startswith(PREFIXES)}


@contextlib.contextmanager
def launched(config: Path, procs: int) -> Iterator[None]:
    """Set the variables of `launch_environment` in the body, and no others of accelerate's."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(PREFIXES)}
    with mock.patch.dict(os.environ, kept | launch_environment(config, procs), clear=True):
        yield


def reset_state() -> None:
    """Drop the state that all Accelerators of a process share, so that the next has its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
