"""DeepSpeed's operators, compiled once for each set of sources, options, compilers and versions.

DeepSpeed and torch compile them again in every environment, and wait forever for the lock of a
process that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from pipeline import StageError
from pipeline.utils import sync

LOG = logging.getLogger("pipe.operators")


def folder() -> Path:
    """Folder of the compiled operators: `TORCH_EXTENSIONS_DIR`, or one in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "pipetrain" / "operators")


def keep_operators() -> None:
    """Make DeepSpeed import operators from `folder()`, and keep there the ones it compiles."""
    import cpuinfo
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils import cpp_extension

    if shutil.which("ninja") is None:  # pip's, where `pipe` is called by its path
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{sysconfig.get_path('scripts')}"
    original = getattr(OpBuilder.jit_load, "__wrapped__", OpBuilder.jit_load)

    @functools.wraps(original)
    def jit_load(builder: Any, verbose: bool = True) -> ModuleType:
        with (
            mock.patch.object(cpp_extension, "load", functools.partial(load, cpp_extension.load)),
            mock.patch.object(cpuinfo, "get_cpu_info", _cpu_info),
        ):
            module: ModuleType = original(builder, verbose)
        return module

    OpBuilder.jit_load = jit_load


@functools.cache
def _cpu_info() -> dict[str, Any]:
    """Facts about the CPU; finding them takes a second, and DeepSpeed asks twice per operator."""
    from cpuinfo.cpuinfo import get_cpu_info

    found: dict[str, Any] = get_cpu_info()
    return found


def load(compiler: Callable[..., Any], name: str, sources: list[str], **options: Any) -> ModuleType:
    """The module that `compiler`, torch's `cpp_extension.load`, makes of the same arguments; it is
    only called for an operator that is not kept."""
    library = folder() / f"{name}-{_key(name, sources, options)}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock"), name):
            if not library.exists():
                LOG.info("compiling DeepSpeed's %s, once: it is kept in %s", name, library.parent)
                _compile(functools.partial(compiler, name, sources, **options), name, library)
    return _imported(name, library)


def _key(name: str, sources: list[str], options: dict[str, Any]) -> str:
    """A hash that is equal if the same code is compiled for the same machine, in any folders."""
    import deepspeed

    places = [Path(str(package.__file__)).parent.parent for package in (torch, deepspeed)]
    own = [Path(path) for path in options.get("extra_include_paths") or ()]
    own = [path for path in own if any(path.is_relative_to(place) for place in places)]
    files = [*map(Path, sources), *sorted(file for path in own for file in path.rglob("*.*"))]
    facts = {
        "versions": [torch.__version__, torch.version.cuda, torch.version.hip,
                     deepspeed.__version__, sysconfig.get_config_var("SOABI"), platform.libc_ver()],
        "compilers": _compilers(name, options),
        "cpu": _cpu_info()["flags"] if "native" in str(options) else None,
        "gpu": os.environ.get("TORCH_CUDA_ARCH_LIST"),
        "options": {name: value for name, value in options.items() if name != "verbose"},
        "files": [[file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in files],
    }  # fmt: skip
    described = json.dumps(facts)
    for place in places:
        described = described.replace(str(place), "")
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _compilers(name: str, options: dict[str, Any]) -> list[str]:
    """Output of `--version` of the compilers that would run. Raises StageError without any."""
    from torch.utils import cpp_extension

    compilers = [shlex.split(cpp_extension.get_cxx_compiler())]  # type: ignore[no-untyped-call]
    if options.get("with_cuda") and cpp_extension.CUDA_HOME:
        compilers.append([str(Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc")])
    try:
        return [subprocess.check_output([*one, "--version"], text=True) for one in compilers]
    except (OSError, subprocess.CalledProcessError) as error:
        raise StageError(
            f"no compiler for DeepSpeed's {name}: {error}",
            hint="install a C++ compiler (`apt install build-essential`), or name one in CXX",
        ) from error


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Let in one process at a time; the system frees the lock of a process that was killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            LOG.info("waiting for another process that compiles DeepSpeed's %s", name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: Callable[..., Any], name: str, library: Path) -> None:
    """Compile in a new folder: children of a killed process may still write into theirs."""
    from torch.utils import cpp_extension

    for left in library.parent.glob(f"{library.stem}.*/"):
        shutil.rmtree(left, ignore_errors=True)
    # torch numbers a name that this process compiled before, and the entry point with it.
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
    with tempfile.TemporaryDirectory(prefix=f"{library.stem}.", dir=library.parent) as building:
        made = Path(compiler(build_directory=building, is_python_module=False))
        sync(made)
        made.replace(library)


def _imported(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise StageError(f"{library}: not a Python module", hint="delete it")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
