"""torch and what lies beside it."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.doctor.report import MachineReport
from pipeline.doctor.rules.finding import Finding


def torch_cannot_use_gpus(machine: MachineReport) -> Iterator[Finding]:
    """The driver has GPUs that torch has not: it has no CUDA, or one newer than the driver."""
    software = machine.software
    gpus, usable = software.gpus or 0, len(machine.devices)
    silent = any(failure.measurement == "torch" for failure in machine.failures)
    if silent or usable >= gpus or "torch" not in software.packages:
        return
    torch = f"torch {software.packages['torch']}"
    driver = f"driver {software.driver}" if software.driver else "the driver"
    if usable:
        seen, do = f"{torch} can use {usable} only", "nvidia-smi tells the state of the others"
    elif software.torch_cuda is None and software.torch_problem is None:
        seen, do = f"{torch} was built without CUDA", "pip install a torch built for CUDA"
    else:
        told = software.torch_problem or "torch does not say why"
        cuda = f" for CUDA {software.torch_cuda}" if software.torch_cuda else ""
        seen = f"{torch}{cuda} cannot use them under {driver}: {told}"
        do = "update the driver, or pip install a torch built for the CUDA that nvidia-smi names"
    yield Finding(
        severity="error",
        name="driver",
        seen=f"{gpus} GPUs, but {seen}",
        why="a run starts a process for each of them, which fails",
        do=do,
    )


def no_driver(machine: MachineReport) -> Iterator[Finding]:
    """A torch for CUDA on a machine without one."""
    software = machine.software
    if software.torch_cuda is None or software.gpus != 0 or machine.devices:
        return
    yield Finding(
        severity="warning",
        name="no-driver",
        seen=f"torch is built for CUDA {software.torch_cuda}, but there is no GPU with a driver",
        why="training runs on the processor",
        do="install NVIDIA's driver, start the container with its GPUs (docker run --gpus all), or "
        "look at CUDA_VISIBLE_DEVICES",
    )


def torch_is_broken(machine: MachineReport) -> Iterator[Finding]:
    """It is not there, or cannot be imported."""
    software = machine.software
    problem = software.torch_problem or ""
    if software.python is not None and "torch" not in software.packages:
        problem = "torch is not installed"
    elif not problem.startswith("torch cannot be imported"):
        return
    yield Finding(
        severity="error",
        name="torch",
        seen=problem,
        why="nothing can be trained",
        do="pip install --force-reinstall torch",
    )


def companion_of_another_build(machine: MachineReport) -> Iterator[Finding]:
    """torchvision's and torchaudio's compiled code fits one torch only."""
    software = machine.software
    torch = software.packages.get("torch")
    for name, needed in software.needs_torch.items():
        own = software.packages.get(name, "")
        if torch is None or (_fits(needed, torch) and _build(own) in ("", _build(torch))):
            continue
        yield Finding(
            severity="error",
            name="torchvision",
            seen=f"{name} {own} was built for torch {needed}, but torch is {torch}",
            why="transformers imports it with many models, and it cannot be loaded",
            do=f"pip uninstall {name}, or install the one from where torch {torch} came from",
        )


def _fits(needed: str, torch: str) -> bool:
    """A requirement without a build (2.8.0) is met by any (2.8.0+cu128)."""
    return torch == needed or torch.partition("+")[0] == needed


def _build(version: str) -> str:
    return version.partition("+")[2]


def no_compiler(machine: MachineReport) -> Iterator[Finding]:
    """DeepSpeed compiles its operators where they are first used."""
    tools = machine.operators
    if not tools.known:
        return
    missing = [name for name in ("compiler", "ninja") if getattr(tools, name) is None]
    if missing:
        both = " and no ".join({"compiler": "C++ compiler"}.get(name, name) for name in missing)
        yield Finding(
            severity="warning",
            name="compiler",
            seen=f"no {both}",
            why="DeepSpeed's CPU Adam, which offloaded optimizers use, cannot be compiled",
            do="apt install build-essential; pip install ninja",
        )
    if machine.devices and tools.cuda_home is None:
        yield Finding(
            severity="warning",
            name="cuda-home",
            seen="no CUDA toolkit (nvcc) was found",
            why="DeepSpeed's operators for GPUs cannot be compiled",
            do="install the toolkit of torch's CUDA version, or set CUDA_HOME to it",
        )


def no_libaio(machine: MachineReport) -> Iterator[Finding]:
    """Only NVMe offload needs it."""
    if machine.operators.known and not machine.operators.libaio:
        yield Finding(
            severity="note",
            name="libaio",
            seen="no libaio with its header",
            why="offload to NVMe cannot be compiled",
            do="apt install libaio-dev",
        )


RULES = (
    torch_is_broken,
    torch_cannot_use_gpus,
    no_driver,
    companion_of_another_build,
    no_compiler,
    no_libaio,
)
