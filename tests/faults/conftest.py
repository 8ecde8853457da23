"""Runs of misbehaving stages in real processes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.distributed.environment import rank_environment
from tests.support.pipe import Pipe
from tests.support.ports import free_port
from tests.support.processes import forking

HERE = Path(__file__).parent
ENTRIES = {
    "fault.declare": "faulty_stages:Declare",
    "fault.train": "faulty_stages:Train",
    "fault.export": "faulty_stages:Export",
    "fault.report": "faulty_stages:Report",
    "fault.point": "faulty_stages:Point",
    "fault.data": "faulty_data:ToyData",
}


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that any process with it on its path sees as an installed distribution."""
    return install_plugin(tmp_path_factory.mktemp("plugin"))


def install_plugin(folder: Path) -> Path:
    """Write the distribution of the misbehaving stages into a folder; return that."""
    for module in ("faulty_stages", "faulty_data"):
        shutil.copy(HERE / f"{module}.py", folder)
    info = folder / "faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in ENTRIES.items()]
    (info / "entry_points.txt").write_text("[pipe.stages]\n" + "\n".join(lines) + "\n")
    return folder


@pytest.fixture
def pipe(plugin: Path, tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(plugin, tmp_path, starts=True)
    yield pipe
    assert pipe.processes() == []


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """Return a folder in memory, where fsync takes no time."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def pipe_in_child(plugin: Path) -> Callable[..., int]:
    """Run `pipe ARGUMENTS` in a process that has torch loaded already, which is the only rank of a
    launcher without a name; return its exit code."""
    context = forking()

    def call(*arguments: str, kill_at: str = "") -> int:
        process = context.Process(target=_child, args=(str(plugin), arguments, kill_at))
        process.start()
        process.join(120)
        assert process.exitcode is not None
        return process.exitcode

    return call


def _child(plugin: str, arguments: tuple[str, ...], kill_at: str) -> None:
    from pipeline.cli import main

    sys.path.insert(0, plugin)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= rank_environment(0, 1) | meeting
    os.environ |= {"KILL_AT": kill_at, "OMP_NUM_THREADS": "1"}
    main(arguments)
