"""Places that schedulers give: Slurm, Kubeflow, SkyPilot, dstack."""

from __future__ import annotations

from pipeline.distributed.hosts import expand_counts, expand_hosts
from pipeline.distributed.placement import (
    RDZV_PORT,
    Environ,
    NodePlacement,
    Placement,
    RankPlacement,
    address,
    bounds,
    consistent,
    incomplete,
    number,
    optional,
    port_number,
)
from pipeline.errors import UsageError


def slurm(environ: Environ) -> Placement | None:
    """A task of `srun`: one of several on its node is a rank, one alone on each of several nodes
    starts its node's ranks. A batch script's own shell has no SLURM_STEP_NUM_TASKS
    (https://slurm.schedmd.com/srun.html, output environment variables)."""
    tasks = optional(environ, "SLURM_STEP_NUM_TASKS") or 1
    if tasks == 1:
        return None
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST")
    missing = [name for name in needed if name not in environ]
    if missing:
        raise incomplete(environ, ["SLURM_STEP_NUM_TASKS"], missing)
    hosts, node = expand_hosts(environ["SLURM_STEP_NODELIST"]), number(environ, "SLURM_NODEID")
    if node >= len(hosts):
        raise UsageError(
            f"SLURM_NODEID={node}, but SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} has "
            f"{len(hosts)} hosts"
        )
    job, step = optional(environ, "SLURM_JOB_ID") or 0, optional(environ, "SLURM_STEP_ID") or 0
    host = environ.get("MASTER_ADDR", hosts[0])
    port = port_number(environ, "MASTER_PORT", 20_000 + (job * 16 + step) % 20_000)
    if tasks == len(hosts):
        return NodePlacement(
            source="Slurm", node_rank=node, min_nodes=tasks, max_nodes=tasks, host=host, port=port,
            job=f"slurm-{job}.{step}",
        )  # fmt: skip
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", str(tasks)))
    if sum(counts) != tasks or len(counts) != len(hosts):
        raise UsageError(
            f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')} contradicts "
            f"SLURM_STEP_NUM_TASKS={tasks} on {len(hosts)} hosts"
        )
    found = RankPlacement(
        source="Slurm",
        rank=number(environ, "SLURM_PROCID"),
        world_size=tasks,
        local_rank=number(environ, "SLURM_LOCALID"),
        local_world_size=counts[node],
        host=host,
        port=port,
        job=f"slurm-{job}.{step}",
    )
    return consistent(
        found, environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    )  # fmt: skip


def require_task(environ: Environ) -> None:
    """Raise UsageError in the batch script of a Slurm job of several nodes, where `srun` was
    forgotten: a run would use the first of them only."""
    nodes = optional(environ, "SLURM_NNODES") or 1
    if nodes > 1 and "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" not in environ:
        raise UsageError(
            f"this Slurm job has {nodes} nodes, but this is the batch script, not a task",
            hint="start it with `srun pipe run ...`, or unset SLURM_NNODES",
        )


def kubeflow(environ: Environ) -> NodePlacement | None:
    """torchrun's options as variables (PET_*), which Kubeflow's Trainer sets."""
    if "PET_NNODES" not in environ:
        return None
    fewest, most = bounds(environ["PET_NNODES"], "PET_NNODES")
    procs = environ.get("PET_NPROC_PER_NODE", "auto")
    count = int(procs) if procs.isdecimal() else None
    if count == 0 or (count is None and procs not in ("auto", "gpu", "cpu")):
        raise UsageError(f"PET_NPROC_PER_NODE={procs} is neither a number above 0 nor auto")
    rank, master = optional(environ, "PET_NODE_RANK"), ("127.0.0.1", RDZV_PORT)
    if most > 1:
        there = environ.get("PET_MASTER_ADDR")
        if endpoint := environ.get("PET_RDZV_ENDPOINT"):
            master = address(endpoint, "PET_RDZV_ENDPOINT")
        elif there:
            master = there, port_number(environ, "PET_MASTER_PORT", RDZV_PORT)
        missing = ["PET_MASTER_ADDR"] * (not there and not endpoint)
        missing += ["PET_NODE_RANK"] * (rank is None)
        if missing:
            raise incomplete(environ, ["PET_NNODES"], missing)
    return _node(
        NodePlacement(
            source="Kubeflow's PET_* variables",
            node_rank=rank or 0,
            min_nodes=fewest,
            max_nodes=most,
            host=master[0],
            port=master[1],
            procs=count,
        )
    )


def skypilot(environ: Environ) -> NodePlacement | None:
    nodes = optional(environ, "SKYPILOT_NUM_NODES") or 1
    if nodes == 1:
        return None
    missing = [n for n in ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS") if n not in environ]
    if missing:
        raise incomplete(environ, ["SKYPILOT_NUM_NODES"], missing)
    addresses = environ["SKYPILOT_NODE_IPS"].split()
    if len(addresses) != nodes:
        raise UsageError(
            f"SKYPILOT_NUM_NODES={nodes}, but SKYPILOT_NODE_IPS has {len(addresses)} addresses"
        )
    return _cloud(environ, "SkyPilot", "SKYPILOT_NODE_RANK", nodes, addresses[0],
                  "SKYPILOT_NUM_GPUS_PER_NODE")  # fmt: skip


def dstack(environ: Environ) -> NodePlacement | None:
    nodes = optional(environ, "DSTACK_NODES_NUM") or 1
    if nodes == 1:
        return None
    missing = [n for n in ("DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP") if n not in environ]
    if missing:
        raise incomplete(environ, ["DSTACK_NODES_NUM"], missing)
    return _cloud(environ, "dstack", "DSTACK_NODE_RANK", nodes, environ["DSTACK_MASTER_NODE_IP"],
                  "DSTACK_GPUS_PER_NODE")  # fmt: skip


def _cloud(
    environ: Environ, source: str, rank: str, nodes: int, host: str, gpus: str
) -> NodePlacement:
    return _node(
        NodePlacement(
            source=source,
            node_rank=number(environ, rank),
            min_nodes=nodes,
            max_nodes=nodes,
            host=host,
            port=port_number(environ, "MASTER_PORT", RDZV_PORT),
            procs=optional(environ, gpus) or None,
        )
    )


def _node(found: NodePlacement) -> NodePlacement:
    if found.node_rank >= found.max_nodes:
        raise UsageError(f"{found.describe()}: node ranks count from 0")
    return found
