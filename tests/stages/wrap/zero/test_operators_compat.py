"""DeepSpeed's operators are compiled once, through DeepSpeed's own `jit_load`, here with a builder
small enough to compile in a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import deepspeed
import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from stages.wrap.zero import operators_compat
from stages.wrap.zero.compat import point_at_device
from tests.support.waiting import becomes, descendants

SOURCE = """
#include <Python.h>
#define ENTRY_OF(name) PyInit_##name
#define ENTRY(name) ENTRY_OF(name)
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "number", nullptr, -1, nullptr};
PyMODINIT_FUNC ENTRY(TORCH_EXTENSION_NAME)() {
    PyObject* module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "number", NUMBER);
    return module;
}
"""


class Number(OpBuilder):  # type: ignore[misc]
    """Builds a module that holds a number; its sources are in a separate folder."""

    def __init__(self, folder: Path, number: int = 7) -> None:
        super().__init__(name="number")
        self._folder = folder
        folder.mkdir(exist_ok=True)
        source = SOURCE.replace("NUMBER", str(number))
        if not (folder / "number.cpp").exists():
            (folder / "number.cpp").write_text(source, encoding="utf-8")

    def absolute_name(self) -> str:
        return "tests.number"

    def sources(self) -> list[str]:
        return [str(self._folder / "number.cpp")]

    def cxx_args(self) -> list[str]:
        return ["-O0"]

    def jit_load(self, verbose: bool = False) -> ModuleType:
        module: ModuleType = super().jit_load(verbose)
        OpBuilder._loaded_ops.pop(self.name)
        return module


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of cached operators."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kept"))
    point_at_device(DistContext(device=torch.device("cpu")))
    return tmp_path / "kept"


def compiler(folder: Path, first: str = "true") -> str:
    """Return a C++ compiler that does something before it compiles."""
    script = folder / "g++"
    does = f'case "$*" in *" -c "*) {first};; esac\nexec g++ "$@"\n'
    script.write_text(f"#!/bin/sh\n{does}", encoding="utf-8")
    script.chmod(0o755)
    return str(script)


LOAD = """
import sys
from pathlib import Path
from tests.stages.wrap.zero.test_operators_compat import Number, point_at_device, DistContext, torch
point_at_device(DistContext(device=torch.device("cpu")))
print(*(Number(Path(folder)).jit_load().number for folder in sys.argv[1:]))
"""


def test_each_installation_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = operators_compat._folder()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert operators_compat._folder() == plain  # of a run on CPUs, which asks no GPU
    for place, name, other in (
        (torch, "__version__", "another"), (deepspeed, "__version__", "another"),
        (operators_compat.metadata, "version", lambda name: f"{name} 9"),
        (os, "environ", {**os.environ, "DS_ACCELERATOR": "cuda"}),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(place, name, other)
            assert operators_compat._folder() != plain


def test_another_process_asks_neither_ninja_nor_the_compiler(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = Number(tmp_path / "one")
    first, library = number.jit_load(), kept / "number" / "number.so"
    assert (first.number, first.__file__) == (7, str(library))
    with monkeypatch.context() as patch:
        patch.setattr(cpp_extension, "load", None)
        again = number.jit_load()
    assert (again.number, again.__file__) == (7, str(library))
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("ninja", "c++"):
        (bin_ / name).write_text(f"#!/bin/sh\ntouch {bin_}/asked\nexit 1\n")
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_), prepend=os.pathsep)
    command = [sys.executable, "-c", LOAD, str(tmp_path / "one")]
    compiled = library.stat()
    assert subprocess.run(command, check=True, capture_output=True).stdout.split()[-1] == b"7"
    after = library.stat()
    assert (after.st_ino, after.st_mtime_ns) == (compiled.st_ino, compiled.st_mtime_ns)
    assert not (bin_ / "asked").exists()
    (bin_ / "c++").unlink()
    assert Number(tmp_path / "two", number=8).jit_load().number == 8  # by these packages' ninja
    assert not (bin_ / "asked").exists()


def test_other_sources_are_compiled(tmp_path: Path) -> None:
    """Also after a module that torch numbered, which is not taken for the kept one."""
    one, two = tmp_path / "one", tmp_path / "two"
    Number(one, number=1)
    Number(two, number=2)

    def loaded(*folders: Path) -> list[int]:
        command = [sys.executable, "-c", LOAD, *map(str, folders)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [int(number) for number in said.splitlines()[-1].split()]

    assert loaded(one, two) == [1, 2]
    assert loaded(one) == [1]
    assert loaded(two) == [2]


OTHERS = [pytest.param(one, marks=pytest.mark.full) for one in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize("number", [signal.SIGKILL, *OTHERS])
def test_compilers_end_with_the_process_that_compiles(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Each is in a process group by itself; Ctrl-C raises in the process that waits. A killed
    compilation leaves nothing to wait for, and none that counts as complete."""
    command = [sys.executable, "-c", LOAD, str(tmp_path / "one")]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("CXX", compiler(tmp_path, first="sleep 600"))
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            compilers = descendants(process.pid, "sleep")
            assert len({os.getpgid(child.pid) for child in compilers}) > 1
        finally:
            process.send_signal(number)
        process.wait(30)
    assert becomes(lambda: not any(child.is_running() for child in compilers), 15), compilers
    assert (kept / "number" / "lock").exists() or number != signal.SIGKILL
    assert not (kept / "number" / "number.complete").exists()
    compiler(tmp_path)
    assert Number(tmp_path / "one").jit_load().number == 7


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StageError, match="DeepSpeed's number cannot be compiled: "):
        Number(tmp_path / "one").jit_load()
