"""Where runs are written, and the way to other machines."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.doctor.report import MachineReport
from pipeline.doctor.rules.finding import Finding
from pipeline.utils.text import human

NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "virtiofs", "afs"}
"""Not the parallel ones (Lustre, GPFS, BeeGFS, WekaFS), which are made for this."""
MEMORY = {"tmpfs", "ramfs"}
LAYER = {"overlay", "aufs"}
LITTLE = 10e9
SLOW_NETWORK = 10e9
"""Bits per second."""


def not_writable(machine: MachineReport) -> Iterator[Finding]:
    """Nor could a run be."""
    for folder in machine.folders:
        runs = folder.use == "runs"
        if not folder.writable:
            yield Finding(
                severity="error",
                name="not-writable",
                seen=f"{folder.path}, for {folder.use}, cannot be written to",
                why="a run cannot be written" if runs else "a run cannot start without them",
                do="--runs FOLDER" if runs else "make room there, or set TMPDIR to another folder",
            )


def nearly_full(machine: MachineReport) -> Iterator[Finding]:
    """For runs; temporary files are small."""
    for folder in machine.folders:
        free = folder.free_bytes
        if folder.use == "runs" and free is not None and free < LITTLE:
            yield Finding(
                severity="warning",
                name="disk-space",
                seen=f"{folder.path} has {human(free)} free",
                why="a checkpoint of a 1B model with its AdamW takes 12 GB",
                do="make room, or write elsewhere: --runs FOLDER",
            )


def kind_of_filesystem(machine: MachineReport) -> Iterator[Finding]:
    """One that is slow, or forgets."""
    for folder in machine.folders:
        kind = folder.filesystem or ""
        if kind in NETWORK:
            yield Finding(
                severity="warning",
                name="network-folder",
                seen=f"{folder.path}, for {folder.use}, is on {kind}",
                why="checkpoints go over the network, and all ranks wait when the server does",
                do="keep runs on a local disk, or save less often (checkpoint's `every`)"
                if folder.use == "runs"
                else "set TMPDIR to a local folder",
            )
        if folder.use == "runs" and kind in MEMORY:
            yield Finding(
                severity="warning",
                name="folder-in-memory",
                seen=f"{folder.path} is on {kind}",
                why="runs take host memory, and are lost when the machine stops",
                do="write to a disk: --runs FOLDER",
            )
        if folder.use == "runs" and kind in LAYER:
            yield Finding(
                severity="note",
                name="container-layer",
                seen=f"{folder.path} is in the container itself ({kind})",
                why="runs are lost with the container",
                do="mount a folder of the host: docker run -v /data/runs:/runs, --runs /runs",
            )


def slow_network(machine: MachineReport) -> Iterator[Finding]:
    """Only where every interface tells its speed."""
    speeds = [interface.bits_per_s for interface in machine.network.interfaces]
    known = [speed for speed in speeds if speed is not None]
    if machine.network.rdma or not known or len(known) < len(speeds) or max(known) >= SLOW_NETWORK:
        return
    yield Finding(
        severity="note",
        name="slow-network",
        seen=f"the fastest interface has {max(known) / 1e9:g} Gbit/s, and there is no RDMA",
        why="training over several such machines mostly waits for the network",
        do="train on one machine, or accumulate gradients over many micro-batches",
    )


RULES = (not_writable, nearly_full, kind_of_filesystem, slow_network)
