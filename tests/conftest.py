"""Environment, order and tiers of all tests."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from pipeline.utils import terminal
from tests.support.processes import forking
from tests.support.tier import FULL, times

if TYPE_CHECKING:
    from tests.support.matrix import Matrix

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
    start, hide the values of others, and choose what is shown."""
    kept = (os.environ, terminal._hidden, terminal._guessed)
    before, typed = [dict(each) for each in kept], set(terminal._typed)
    shows = terminal.shows
    yield
    terminal.shows = shows
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


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory, deepspeed_operators: None) -> Matrix:
    """Return checkpoints of every strategy and world size, which all workers of a session share."""
    from tests.support.matrix import Matrix

    own = tmp_path_factory.getbasetemp()
    return Matrix((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "matrix")


DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of the files whose tests take longest, in the quick tier on two processes. They run
first, so that none is left for a single process at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help=f"write {DURATIONS.name} after the run"
    )


class Durations:
    """Adds up the seconds of each file's tests."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        longest = {file: round(took) for file, took in self.seconds.most_common() if took >= 3}
        DURATIONS.write_text(json.dumps(longest, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs in the full tier only")
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


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
    seconds: dict[str, int] = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))
