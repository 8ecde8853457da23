"""DeepSpeed's operators in torch's cache of extensions, without its wait for a killed process."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

from pipeline import StageError
from pipeline.utils import activity, cache_folder, ended_with_this, wait_for_lock

LOG = logging.getLogger("pipe.operators")


def keep_operators() -> None:
    """Make DeepSpeed keep the operators that it compiles, compile one at a time, and load a kept
    one without asking ninja and the compiler, which takes seconds. They are in
    `TORCH_EXTENSIONS_DIR`, or in the user's cache in a folder of these packages."""
    import cpuinfo
    from deepspeed.ops.op_builder.builder import OpBuilder

    cpp_extension.subprocess = _Subprocess()  # type: ignore[assignment, attr-defined]
    if hasattr(OpBuilder.jit_load, "__wrapped__"):
        return
    # It takes a second, and DeepSpeed calls it twice for some operators.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    compiling = OpBuilder.jit_load

    @functools.wraps(compiling)
    def jit_load(builder: Any, verbose: bool = True) -> ModuleType:
        root = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", _folder()))
        library = root / builder.name / f"{builder.name}.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as file:
            wait_for_lock(file)
            facts = hashlib.sha256(_facts().encode())
            for source in builder.sources():
                facts.update(Path(builder.deepspeed_src_path(source)).read_bytes())
            complete, digest = library.with_suffix(".complete"), facts.hexdigest()
            if library.exists() and complete.exists() and complete.read_text() == digest:
                load: Any = cpp_extension._import_module_from_library
                kept: ModuleType = load(builder.name, str(library.parent), is_python_module=True)
                OpBuilder._loaded_ops[builder.name] = kept
                return kept
            # A killed process does not free torch's own lock, and may leave half a library.
            for stale in (library.parent / "lock", complete):
                stale.unlink(missing_ok=True)
            if not library.exists():
                LOG.info("compiling DeepSpeed's %s, once: it is kept in %s", builder.name, root)
            try:
                with activity(f"compiling DeepSpeed's {builder.name}"):
                    module: ModuleType = compiling(builder, verbose)
            except (RuntimeError, OSError) as error:
                raise StageError(
                    f"DeepSpeed's {builder.name} cannot be compiled: {error}",
                    hint="install a C++ compiler (`apt install build-essential`), or name one in "
                    "CXX",
                ) from error
            if module.__file__ == str(library):  # torch numbers those after the first in a process
                complete.write_text(digest)
        return module

    OpBuilder.jit_load = jit_load


class _Subprocess:
    """`subprocess` for torch's building of extensions, with these packages' ninja: another version
    does not read its log, and builds everything again."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def check_output(self, command: Any, **options: Any) -> Any:
        """Return what a command prints."""
        if command[:1] == ["ninja"]:
            command = [ninja(), *command[1:]]
        return subprocess.check_output(command, **options)

    def run(self, command: Any, **options: Any) -> Any:
        """Run a command, ninja in a session by itself, which ends with this process: what kills
        this one's group would leave the compilers. Whoever ends it asks it to, so that it can end
        them."""
        if command[:1] != ["ninja"]:
            return subprocess.run(command, **options)
        own, check = ended_with_this([ninja(), *command[1:]]), options.pop("check")
        with subprocess.Popen(own, start_new_session=True, **options) as process:
            try:
                output, _ = process.communicate()
            except BaseException:
                process.terminate()
                raise
        ended = subprocess.CompletedProcess(command, process.returncode, output)
        if check:
            ended.check_returncode()
        return ended


@functools.cache
def ninja() -> str:
    """The path of these packages' ninja; the system's, if theirs has none."""
    found = metadata.distribution("ninja")
    paths = (str(found.locate_file(file)) for file in found.files or () if file.name == "ninja")
    own = (path for path in paths if os.access(path, os.X_OK) and Path(path).is_file())
    return next(own, "ninja")


def _folder() -> str:
    """The folder for these packages, this CPU and this compiler, which torch's cache mixes."""
    return str(cache_folder() / "operators" / hashlib.sha256(_facts().encode()).hexdigest()[:16])


def _facts() -> str:
    """The circumstances of an operator: others need another compilation."""
    import cpuinfo
    import deepspeed

    try:  # as Linux lists a CPU's features, which takes no time
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        listed = next(line for line in lines if line.startswith(("flags", "Features")))
        features = sorted(listed.partition(":")[2].split())
    except (OSError, StopIteration):
        features = list(cpuinfo.get_cpu_info().get("flags", ()))
    packages = (torch.__version__, torch.version.git_version, deepspeed.__version__)
    # Operators for CPUs are others, and asking takes memory of a GPU that nothing else uses.
    on_gpu = os.environ.get("DS_ACCELERATOR") == "cuda" and torch.cuda.is_available()
    gpu = torch.cuda.get_device_capability() if on_gpu else None
    compilers = [os.environ.get(name) for name in ("CXX", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST")]
    versions = sys.implementation.cache_tag, metadata.version("ninja")
    return repr((packages, versions, features, gpu, compilers))
