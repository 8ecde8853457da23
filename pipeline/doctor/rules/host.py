"""Host memory, processes, threads and open files."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.doctor.report import MachineReport
from pipeline.doctor.rules.finding import Finding
from pipeline.utils.text import human

SHARED = 1 << 30
"""What NVIDIA's containers are told to be started with (--shm-size=1g)."""
LOCKED = 1 << 30
SWAP_IN_USE = 256 << 20
LOW = 0.1
NEVER_OVERCOMMIT = 2


def little_shared_memory(machine: MachineReport) -> Iterator[Finding]:
    """Containers have 64 MiB of it unless told otherwise."""
    free, total = machine.kernel.shared_memory_free_bytes, machine.kernel.shared_memory_bytes
    if machine.procs > 1 and free is not None and total is not None and free < SHARED:
        yield Finding(
            severity="warning",
            name="shared-memory",
            seen=f"/dev/shm has {human(free)} of {human(total)} free, for {machine.procs} "
            "processes",
            why="processes of a machine exchange through it (NCCL, DeepSpeed on processors, data "
            "loaders) and fail when it is full",
            do="docker run --shm-size=16g, or mount -o remount,size=50% /dev/shm",
        )


def little_locked_memory(machine: MachineReport) -> Iterator[Finding]:
    """DeepSpeed's page-locked buffers and RDMA are counted against the limit; CUDA's are not."""
    limit = machine.kernel.limits.get("locked_memory")
    if limit is None or limit.soft is None or machine.kernel.locks_freely is not False:
        return
    if limit.soft < LOCKED:
        rdma = f", and {', '.join(machine.network.rdma)} cannot register memory"
        yield Finding(
            severity="warning",
            name="locked-memory",
            seen=f"{human(limit.soft)} of memory may be locked (ulimit -l)",
            why="DeepSpeed's page-locked buffers of offload cannot be had"
            + (rdma if machine.network.rdma else ""),
            do="ulimit -l unlimited; permanently a line `* - memlock unlimited` in "
            "/etc/security/limits.conf; docker run --ulimit memlock=-1",
        )


def swapping(machine: MachineReport) -> Iterator[Finding]:
    """Something is kept on disk that was in memory."""
    used = machine.host.swap_used_bytes
    if used is not None and used > SWAP_IN_USE:
        yield Finding(
            severity="warning",
            name="swap",
            seen=f"{human(used)} of swap are in use",
            why="memory was short: a rank that waits for the disk makes all others wait",
            do="end what holds the memory, then swapoff -a && swapon -a",
        )


def little_memory(machine: MachineReport) -> Iterator[Finding]:
    """Of what the machine has, or its control group."""
    free, total = machine.host.memory_free_bytes, machine.host_memory_bytes
    if free is not None and total is not None and free < LOW * total:
        yield Finding(
            severity="warning",
            name="host-memory",
            seen=f"{human(free)} of {human(total)} of host memory are free",
            why="loading, offload and checkpoints need host memory, and processes are killed "
            "without it",
            do="end what holds the memory, or raise the container's limit",
        )


def strict_overcommit(machine: MachineReport) -> Iterator[Finding]:
    """Memory that is only reserved is counted then."""
    if machine.kernel.overcommit_memory == NEVER_OVERCOMMIT:
        yield Finding(
            severity="warning",
            name="overcommit",
            seen="vm.overcommit_memory is 2",
            why="CUDA and forked processes reserve much more memory than they use, and are refused",
            do="sysctl vm.overcommit_memory=0",
        )


OPEN_FILES = 4096
PROCESSES = 4096


def few_cores(machine: MachineReport) -> Iterator[Finding]:
    """A rank is a process that is always busy, even beside a GPU."""
    cores = machine.host.cores
    if cores is not None and cores < machine.procs:
        yield Finding(
            severity="warning",
            name="cores",
            seen=f"{machine.procs} processes share {cores:g} cores",
            why="all wait for those that have none at the moment",
            do="start fewer processes, or give the job more cores (Slurm: --cpus-per-task; docker: "
            "--cpus)",
        )


def too_many_threads(machine: MachineReport) -> Iterator[Finding]:
    """The environment's number overrules the share that a run would give its ranks."""
    text = machine.environment.get("OMP_NUM_THREADS", "")
    cores = machine.host.cores
    if cores is None or not text.isdecimal() or int(text) == 1:
        return
    if int(text) * machine.procs > cores:
        yield Finding(
            severity="warning",
            name="threads",
            seen=f"OMP_NUM_THREADS={text} in {machine.procs} processes on {cores:g} cores",
            why="threads that wait for each other take the cores from those that work",
            do="unset OMP_NUM_THREADS: a run shares the cores among its ranks",
        )


def few_files(machine: MachineReport) -> Iterator[Finding]:
    """Connections and mapped shards are open files."""
    limit = machine.kernel.limits.get("open_files")
    if limit is not None and limit.soft is not None and limit.soft < OPEN_FILES:
        yield Finding(
            severity="warning",
            name="open-files",
            seen=f"a process may open {limit.soft} files (ulimit -n)",
            why="shards of data and weights and connections to all ranks may need more",
            do="ulimit -n 65536; permanently a line `* - nofile 65536` in "
            "/etc/security/limits.conf; docker run --ulimit nofile=65536",
        )


def few_processes(machine: MachineReport) -> Iterator[Finding]:
    """Threads count too. The user's limit and that of a control group hold both."""
    limit = machine.kernel.limits.get("processes")
    group = machine.kernel.processes_in_group
    if limit is not None and limit.soft is not None and limit.soft < PROCESSES:
        yield _processes(limit.soft, "ulimit -u", "ulimit -u 65536")
    if group is not None and group < PROCESSES:
        do = "docker run --pids-limit 65536; in a systemd unit or slice, TasksMax=infinity"
        yield _processes(group, "pids.max of the control group", do)


def _processes(limit: int, of: str, do: str) -> Finding:
    return Finding(
        severity="warning",
        name="processes",
        seen=f"{limit} processes and threads are allowed ({of})",
        why="a rank has dozens of threads, and one that cannot be started ends the run",
        do=do,
    )


def core_dumps(machine: MachineReport) -> Iterator[Finding]:
    """A dump holds all memory of its process."""
    limit = machine.kernel.limits.get("core")
    if limit is not None and limit.soft is None:
        yield Finding(
            severity="note",
            name="core-dumps",
            seen="core dumps have no limit (ulimit -c)",
            why="a rank that crashes may write as many bytes as it has memory",
            do="ulimit -c 0, unless you want them",
        )


RULES = (
    little_shared_memory,
    little_locked_memory,
    swapping,
    little_memory,
    strict_overcommit,
    few_cores,
    too_many_threads,
    few_files,
    few_processes,
    core_dumps,
)
