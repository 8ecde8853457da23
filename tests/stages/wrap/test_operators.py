"""DeepSpeed's operators are compiled once for what they are compiled from, through DeepSpeed's own
`jit_load`, here of a builder small enough to compile in a second."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

from pipeline.distributed.process_group import DistContext
from pipeline.errors import StageError
from stages.wrap.zero import operators_compat
from stages.wrap.zero.compat import point_at_device

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
    """Builds a module that holds a number; its sources lie in a folder of their own."""

    def __init__(self, folder: Path, number: int = 7) -> None:
        super().__init__(name="number")
        self._folder, self._number = folder, number
        folder.mkdir(exist_ok=True)
        (folder / "number.cpp").write_text(SOURCE, encoding="utf-8")

    def absolute_name(self) -> str:
        return "tests.number"

    def sources(self) -> list[str]:
        return [str(self._folder / "number.cpp")]

    def cxx_args(self) -> list[str]:
        return ["-O0", f"-DNUMBER={self._number}"]

    def jit_load(self, verbose: bool = False) -> ModuleType:
        module: ModuleType = super().jit_load(verbose)
        OpBuilder._loaded_ops.pop(self.name)
        return module


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept operators."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kept"))
    point_at_device(DistContext(device=torch.device("cpu")))
    return tmp_path / "kept"


def compiler(folder: Path, first: str = "true") -> str:
    """A C++ compiler that says a version of its own, and does something before it compiles."""
    script = folder / "g++"
    says = '[ "$1" = --version ] && echo 1 && exit\n'
    does = f'case "$*" in *" -c "*) {first};; esac\nexec g++ "$@"\n'
    script.write_text(f"#!/bin/sh\n{says}{does}", encoding="utf-8")
    script.chmod(0o755)
    return str(script)


def names(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def test_a_second_environment_compiles_nothing(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Number(tmp_path / "one").jit_load()
    assert first.number == 7
    assert Path(str(first.__file__)).parent == kept
    assert names(kept) == [".lock", ".so"]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(cpp_extension, "load", refuse)
    second = Number(tmp_path / "other").jit_load()
    assert (second.number, second.__file__) == (7, first.__file__)
    with pytest.raises(AssertionError, match="compiled"):
        Number(tmp_path / "other", number=8).jit_load()


def test_another_compiler_compiles_anew(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Number(tmp_path / "one").jit_load()
    monkeypatch.setenv("CXX", compiler(tmp_path))
    assert Number(tmp_path / "one").jit_load().number == 7
    assert names(kept) == [".lock", ".lock", ".so", ".so"]


def test_the_key_tells_what_is_compiled_and_not_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Number(tmp_path / "one").sources()
    options: dict[str, Any] = {"extra_cflags": ["-O3"], "extra_include_paths": []}

    def key(**changes: Any) -> str:
        return operators_compat._key("number", sources, {**options, **changes})

    site = Path(torch.__file__).parent.parent
    plain = key()
    assert key(verbose=True) == plain
    assert key(extra_cflags=["-O2"]) != plain
    in_site = key(extra_ldflags=[f"-L{site}/torch/lib"])
    native = key(extra_cflags=["-march=native"])
    with monkeypatch.context() as patch:
        moved = tmp_path / "moved" / "torch" / "__init__.py"
        patch.setattr(torch, "__file__", str(moved))
        assert key(extra_ldflags=[f"-L{moved.parent}/lib"]) == in_site
    with monkeypatch.context() as patch:
        patch.setattr(operators_compat, "_cpu_info", lambda: {"flags": ["another"]})
        assert key() == plain
        assert key(extra_cflags=["-march=native"]) != native
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "another")
        assert key() != plain
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_CUDA_ARCH_LIST", "9.0+PTX")
        assert key() != plain
    Path(sources[0]).write_text(SOURCE + "// changed", encoding="utf-8")
    assert key() != plain


COMPILE = """
import sys
from pathlib import Path
from tests.stages.wrap.test_operators import Number, point_at_device, DistContext, torch
point_at_device(DistContext(device=torch.device("cpu")))
Number(Path(sys.argv[1])).jit_load()
"""


def test_a_killed_compilation_leaves_nothing_to_wait_for(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, first="touch $0.started; sleep 60"))
    command = [sys.executable, "-c", COMPILE, str(tmp_path / "one")]
    killed = subprocess.Popen(command, start_new_session=True)
    while not (tmp_path / "g++.started").exists():
        assert killed.poll() is None
        time.sleep(0.02)
    # The process alone: its children go on, as after a kill for lack of memory.
    killed.kill()
    killed.wait()
    compiler(tmp_path)
    assert Number(tmp_path / "one").jit_load().number == 7
    assert names(kept) == [".lock", ".so"]
    os.killpg(killed.pid, signal.SIGKILL)


def test_waiting_for_a_live_process_is_told(
    tmp_path: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Number(tmp_path / "one").jit_load()
    caplog.clear()
    (library,) = kept.glob("*.so")
    aside = library.rename(tmp_path / "aside")
    with library.with_suffix(".lock").open("w") as file, caplog.at_level(logging.INFO, "pipe"):
        fcntl.flock(file, fcntl.LOCK_EX)

        def finish() -> None:
            while "waiting" not in caplog.text:
                time.sleep(0.01)
            aside.rename(library)
            fcntl.flock(file, fcntl.LOCK_UN)

        other = threading.Thread(target=finish)
        other.start()
        assert Number(tmp_path / "one").jit_load().number == 7
        other.join()
    assert caplog.messages == ["waiting for another process that compiles DeepSpeed's number"]


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StageError, match=r"no compiler for DeepSpeed's number: .*no-such-"):
        Number(tmp_path / "one").jit_load()
