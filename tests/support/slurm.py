"""Slurm on this machine alone: its controller, one node, and its authentication."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scancel", "scontrol", "squeue")
SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
FirstJobId={first}
KillWait=20
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why Slurm cannot be started here; empty if it might."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"{', '.join(missing)} not installed (slurm-wlm, munge)" if missing else ""


class Slurm:
    """A running Slurm. `environment` is that of its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str, **environment: str) -> str:
        """Return what one of its commands prints."""
        done = subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, check=True,
            cwd=self.folder,
        )  # fmt: skip
        return done.stdout

    def state(self, job: str) -> str:
        facts = self.call("scontrol", "show", "job", "--oneliner", job).split()
        return next(fact.partition("=")[2] for fact in facts if fact.startswith("JobState="))

    def wait_for(self, job: str, state: str, limit: float = 60) -> None:
        """Wait until a job has a state."""
        deadline = time.monotonic() + limit
        while self.state(job) != state:
            assert time.monotonic() < deadline, self.state(job)
            time.sleep(0.2)

    def cancel_all(self, limit: float = 30) -> None:
        """End all jobs, so that no process of one is left."""
        deadline = time.monotonic() + limit
        with contextlib.suppress(subprocess.CalledProcessError):  # there may be no controller
            self.call("scancel", f"--user={os.geteuid()}")
            while self.call("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.2)

    def start_again(self, job: str, limit: float = 60) -> None:
        """Start a job that was requeued without the two minutes that Slurm gives it."""
        time.sleep(1.5)  # slurmd refuses a start in the second in which the last one ended
        deadline = time.monotonic() + limit
        while self.state(job) != "RUNNING":
            assert time.monotonic() < deadline, self.state(job)
            with contextlib.suppress(subprocess.CalledProcessError):  # it is still being requeued
                self.call("scontrol", "update", f"JobId={job}", "StartTime=now")
            time.sleep(0.5)


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start Slurm in a folder; end it with all its jobs."""
    found = Slurm(folder)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    ports = [free_port(), free_port()]
    settings = SETTINGS.format(
        host=socket.gethostname(), folder=folder, ports=ports, cores=os.cpu_count(),
        first=os.getpid() % 50_000 + 1,
    )  # fmt: skip
    (folder / "slurm.conf").write_text(settings)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    path = {"PATH": f"{os.environ['PATH']}:/usr/sbin"}
    munged = [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in
              ("key-file", "socket", "pid-file", "log-file", "seed-file")]  # fmt: skip
    try:
        found.call("munged", "--force", *munged, **path)
        found.call("slurmctld", **path)
        found.call("slurmd", **path)
        yield found
    finally:
        found.cancel_all()
        for name in ("slurmd.pid", "slurmctld.pid", "munge.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((folder / name).read_text()), 15)
