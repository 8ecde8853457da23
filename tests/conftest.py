"""Environment, order and tiers of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from pipeline.utils import terminal
from tests.support.processes import forking
from tests.support.tier import FULL, times

# One thread for each process: results do not depend on the number of cores, and ranks do not
# compete for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes started by tests keep their compiled bytecode, as a user's do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Compiling the operators as DeepSpeed does takes twice as long.
os.environ.setdefault("CXX", str(Path(__file__).parent / "support" / "c++"))
# Tests never reach for the hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# Tests of foreign formats read what they have written; tests of trust itself remove this.
os.environ["PIPE_TRUST_PICKLE"] = "1"

# The benchmarks' modules are in no package, and tests import them.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

# No deadlines: on shared machines they would measure the machine.
settings.register_profile("pipetrain", deadline=None, max_examples=times(quick=25, full=300))
settings.load_profile("pipetrain")

# A suite started in the background inherits ignored signals, and its runs would inherit them too.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Put the environment back after each test, and what is hidden of it: commands that run in this
    process set variables, such as the trust in code that an option gives, for the processes they
    start, and hide the values of others."""
    kept = (os.environ, terminal._hidden, terminal._guessed)
    before, typed = [dict(each) for each in kept], set(terminal._typed)
    yield
    for each, content in zip(kept, before, strict=True):
        each.clear()
        each.update(content)
    terminal._typed.clear()
    terminal._typed.update(typed)


@pytest.fixture(scope="session")
def deepspeed_operators() -> None:
    """Compile DeepSpeed's operators before a test with a time limit needs one: the server that
    ranks are forked from does it when it starts."""
    process = forking().Process(target=int)
    process.start()
    process.join()
    assert process.exitcode == 0


LONGEST_FIRST = (
    "tests/parity/test_combinations.py",
    # While that one compiles the operators, these go on without them.
    "tests/recipes/test_quickstart.py",
    "tests/docs/test_chat_templates.py",
    "tests/benchmarks/test_gpu.py",
    "tests/stages/data/test_real_template.py",
    "tests/pipeline/execution/test_saved_plan.py",
    "tests/stages/wrap/test_shares.py",
    "tests/stages/adapter/test_nf4.py",
    "tests/pipeline/execution/test_run_imports.py",
    "tests/pipeline/planning/test_plan_command.py",
    "tests/docs/test_tutorial.py",
    "tests/plugins/test_tworules.py",
    "tests/stages/test_two_trainings.py",
    "tests/benchmarks/test_memories.py",
    "tests/pipeline/planning/test_profile.py",
    "tests/pipeline/doctor/test_doctor.py",
    "tests/pipeline/launch/test_watch.py",
    "tests/pipeline/commands/test_own_packages.py",
    # All others use them.
    "tests/stages/checkpoint/test_continuation.py",
    "tests/faults/test_every_point.py",
    "tests/faults/test_stops.py",
    "tests/plugins/test_third_party_package.py",
    "tests/faults/test_export_command.py",
    "tests/parity/test_parity.py",
    "tests/pipeline/bench/test_runs.py",
    "tests/stages/checkpoint/test_any_to_any.py",
    "tests/faults/test_checkpoint_ranks.py",
    "tests/faults/test_hosts.py",
    "tests/faults/test_resumed_decisions.py",
    "tests/benchmarks/test_allocations.py",
    "tests/benchmarks/test_export.py",
    "tests/faults/test_killed_training.py",
    "tests/faults/test_resume_elsewhere.py",
    "tests/faults/test_random_kills.py",
    "tests/faults/test_failing_ranks.py",
    "tests/stages/checkpoint/test_optimizers.py",
    "tests/stages/train/test_anomalies.py",
    "tests/stages/average/test_ema.py",
)
"""Files whose tests take longest. They run first, so that none is left for a single process at the
end."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs in the full tier alone")


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection: they stay, and runs in this process collect
    again and again."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of the full tier, and put the files that take longest first."""
    if not FULL:
        out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    places = {file: place for place, file in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
