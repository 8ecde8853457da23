"""Processes, threads and open files."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.doctor.report import Machine
from pipeline.doctor.rules.finding import Finding

OPEN_FILES = 4096
PROCESSES = 4096


def few_cores(machine: Machine) -> Iterator[Finding]:
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


def too_many_threads(machine: Machine) -> Iterator[Finding]:
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


def few_files(machine: Machine) -> Iterator[Finding]:
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


def few_processes(machine: Machine) -> Iterator[Finding]:
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


def core_dumps(machine: Machine) -> Iterator[Finding]:
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


PROCESS_RULES = (few_cores, too_many_threads, few_files, few_processes, core_dumps)
