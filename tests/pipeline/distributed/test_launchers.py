"""The environments that launchers set, whole, in part, and against each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli import main
from pipeline.distributed.launchers import expand_counts, expand_hosts, placement, require_task
from pipeline.distributed.placement import NodePlacement, RankPlacement
from pipeline.errors import UsageError
from tests.support.tier import examples

Variables = dict[str, str]

TORCHRUN: Variables = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n0", "MASTER_PORT": "29500",
}  # fmt: skip
ELASTIC = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1"}
BATCH: Variables = {  # an sbatch script's own shell
    "SLURM_JOB_ID": "4242", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
TASKS = BATCH | {  # srun, one task a GPU
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "PMI_RANK": "3", "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
}  # fmt: skip
NODES: Variables = {  # srun, one task a node
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_STEP_TASKS_PER_NODE":
    "1(x2)", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
}  # fmt: skip
OPEN_MPI: Variables = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500",
    "PMIX_NAMESPACE": "prte-1",
}  # fmt: skip
HYDRA: Variables = {
    "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "n0", "MASTER_PORT": "29500",
}  # fmt: skip
KUBEFLOW: Variables = {
    "PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400",
}  # fmt: skip
SKYPILOT: Variables = {
    "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-1",
}  # fmt: skip
DSTACK: Variables = {
    "DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_GPUS_PER_NODE": "8",
    "DSTACK_GPUS_NUM": "16", "DSTACK_MASTER_NODE_IP": "10.0.0.1", "DSTACK_RUN_NAME": "x",
}  # fmt: skip


def without(variables: Variables, *names: str) -> Variables:
    return {name: value for name, value in variables.items() if name not in names}


def ranks(source: str, host: str = "n0", port: int = 29500, job: str = "") -> RankPlacement:
    """Return the place that all of the launchers of ranks above give."""
    return RankPlacement(
        source=source, rank=3, world_size=4, local_rank=1, local_world_size=2, host=host, port=port,
        job=job,
    )  # fmt: skip


def node(
    source: str, rank: int, nodes: int, host: str, port: int = 29400, procs: int | None = 8,
    job: str = "",
) -> NodePlacement:  # fmt: skip
    return NodePlacement(
        source=source, node_rank=rank, nodes=nodes, host=host, port=port, procs=procs, job=job,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, ranks("torchrun's variables")),
        (ELASTIC, ranks("torchrun's variables")),
        (ELASTIC | NODES, ranks("torchrun's variables")),
        (ELASTIC | KUBEFLOW | {"PET_NNODES": "2", "PET_NODE_RANK": "1"},
         ranks("torchrun's variables")),
        (TORCHRUN | TASKS, ranks("torchrun's variables")),
        (TASKS, ranks("Slurm", port=20_000 + 4242 * 16 % 20_000, job="slurm-4242.0")),
        (TASKS | {"MASTER_ADDR": "ib0", "MASTER_PORT": "1234"},
         ranks("Slurm", "ib0", 1234, "slurm-4242.0")),
        (NODES, node("Slurm", 1, 2, "n0", 20_000 + (4242 * 16 + 1) % 20_000, None, "slurm-4242.1")),
        (OPEN_MPI, ranks("Open MPI", job="prte-1")),
        (OPEN_MPI | NODES | {"SLURM_STEP_NUM_TASKS": "2"}, ranks("Open MPI", job="prte-1")),
        (HYDRA, ranks("MPICH")),
        (KUBEFLOW, node("Kubeflow's PET_* variables", 2, 4, "job-node-0-0.job")),
        (without(KUBEFLOW, "PET_MASTER_ADDR") | {"PET_RDZV_ENDPOINT": "h:1", "PET_NNODES": "4"},
         node("Kubeflow's PET_* variables", 2, 4, "h", 1)),
        (KUBEFLOW | {"PET_MASTER_ADDR": "127.0.0.1"},
         node("Kubeflow's PET_* variables", 2, 4, "127.0.0.1")),
        (SKYPILOT, node("SkyPilot", 1, 2, "10.0.0.1")),
        (DSTACK, node("dstack", 1, 2, "10.0.0.1")),
    ],
)  # fmt: skip
def test_whole_environments(variables: Variables, expected: RankPlacement | NodePlacement) -> None:
    assert placement(variables) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, (4, None)),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, (1, 4)),
    ],
)
def test_nodes_and_processes_of_kubeflow(
    variables: Variables, expected: tuple[int, int | None]
) -> None:
    found = placement(variables)
    assert isinstance(found, NodePlacement)
    assert (found.nodes, found.procs) == expected


def test_ranks_of_mpi_on_one_machine_meet_on_its_loopback() -> None:
    local = without(OPEN_MPI, "MASTER_ADDR", "MASTER_PORT") | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    found = [placement(local | {"OMPI_COMM_WORLD_LOCAL_RANK": str(n)}) for n in (1, 3)]
    assert {(one.host, one.port) for one in found if one} == {("127.0.0.1", found[0].port)}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MASTER_ADDR": "somewhere"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        BATCH,
        NODES | {"SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        SKYPILOT | {"SKYPILOT_NUM_NODES": "1"},
        DSTACK | {"DSTACK_NODES_NUM": "1"},
    ],
)
def test_a_process_by_itself(variables: Variables) -> None:
    assert placement(variables) is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
         "RANK=3 and WORLD_SIZE=4 are set by a launcher of several processes, but not LOCAL_RANK: "
         "each process would start its own run"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set by a launcher of several processes, but not "
         "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: each"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 and WORLD_SIZE=4: ranks count from 0"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2: ranks count"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 and WORLD_SIZE=4: this machine"),
        (TORCHRUN | {"RANK": "no"}, "RANK=no, which is not a whole number"),
        (TORCHRUN | TASKS | {"SLURM_PROCID": "2"}, "rank 3 of 4 (torchrun's variables), but rank 2 "
         "of 4 (Slurm) (unset the variables of the launcher that did not start this process)"),
        (TORCHRUN | {"WORLD_SIZE": "5"} | KUBEFLOW,
         "rank 3 of 5 (torchrun's variables), but node 2 of 4 (Kubeflow's PET_* variables)"),
        (without(TASKS, "SLURM_NODEID"), "SLURM_STEP_NUM_TASKS=4 is set by a launcher of several "
         "processes, but not SLURM_NODEID"),
        (TASKS | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2, but SLURM_STEP_NODELIST=n[0-1] has 2"),
        (TASKS | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}, "SLURM_STEP_TASKS_PER_NODE=2,1 contradicts "
         "SLURM_STEP_NUM_TASKS=4 on 2 hosts"),
        (TASKS | {"SLURM_STEP_NODELIST": "n[0-"}, "the host list n[0- is not one of Slurm's"),
        (without(OPEN_MPI, "MASTER_ADDR"), "Open MPI does not say where rank 0 is"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_SIZE=4 is set by a launcher"),
        (KUBEFLOW | {"PET_NNODES": "2:4"}, "PET_NNODES=2:4: nodes that `pipe` starts are a fixed"),
        (KUBEFLOW | {"PET_NODE_RANK": "4"}, "node 4 of 4 (Kubeflow's PET_* variables): node ranks"),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "all"}, "PET_NPROC_PER_NODE=all is neither a number"),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE=0 is neither a number above"),
        (KUBEFLOW | {"PET_MASTER_PORT": "99999"}, "PET_MASTER_PORT=99999, but ports are numbers"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT=, which is not a whole number"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0, but ports are numbers from 1 to 65535"),
        (TASKS | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000, but ports are numbers"),
        (OPEN_MPI | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000, but ports are numbers"),
        (SKYPILOT | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000, but ports are numbers"),
        ({"PET_NNODES": "4"}, "PET_NNODES=4 is set by a launcher of several processes, but not "
         "PET_MASTER_ADDR, PET_NODE_RANK"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.1"}, "SKYPILOT_NUM_NODES=2, but "
         "SKYPILOT_NODE_IPS has 1 addresses"),
        (without(DSTACK, "DSTACK_MASTER_NODE_IP"), "DSTACK_NODES_NUM=2 is set by a launcher"),
        (SKYPILOT | DSTACK | {"DSTACK_NODE_RANK": "0"},
         "node 1 of 2 (SkyPilot), but node 0 of 2 (dstack)"),
    ],
)  # fmt: skip
def test_parts_and_contradictions(variables: Variables, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        placement(variables)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("command", "variables", "words"),
    [
        *((command, {"OMPI_COMM_WORLD_SIZE": "4"},
           "error: OMPI_COMM_WORLD_SIZE=4 is set by a launcher of several")
          for command in ("run", "resume", "bench")),
        ("run", BATCH,
         "error: this Slurm job has 2 nodes, but this is the batch script, not a task (start it "
         "with `srun pipe run ...`, or unset SLURM_NNODES)\n"),
    ],
)  # fmt: skip
def test_commands_refuse_a_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, variables: Variables, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: x\nstages: {}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main, [command, "recipe.yaml"])
    assert result.exit_code == 2
    assert result.stderr.startswith(words)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(
    "variables",
    [{}, BATCH | {"SLURM_NNODES": "1"}, without(BATCH, "SLURM_NNODES"), TASKS,
     BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, without(BATCH, "SLURM_PROCID")],
)  # fmt: skip
def test_these_are_not_batch_scripts_of_several_nodes(variables: Variables) -> None:
    require_task(variables)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[001-003,7]-ib", ["n001-ib", "n002-ib", "n003-ib", "n7-ib"]),
        ("a[1-2],b,c[3]", ["a1", "a2", "b", "c3"]),
        ("r[1-2]n[08-10]", [f"r{r}n{n}" for r in (1, 2) for n in ("08", "09", "10")]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", "a,,b", "a[", "a[1-", "a[x]", "a]", "a[1-2-3]", "a[1-999999]",
     "a[0-9999]" + "[0-9999]" * 3],
)  # fmt: skip
def test_what_is_no_host_list(text: str) -> None:
    with pytest.raises(UsageError, match="host list"):
        expand_hosts(text)


@examples(50)
@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z]{1,4}-?", fullmatch=True),
            st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=3),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_short_is_found(
    groups: list[tuple[str, list[tuple[int, int]], int]],
) -> None:
    short, long = [], []
    for name, spans, width in groups:
        ranges = [f"{low:0{width}}-{low + more:0{width}}" for low, more in spans]
        short.append(f"{name}[{','.join(ranges)}]" if ranges else name)
        for low, more in spans:
            long += [f"{name}{n:0{len(f'{low:0{width}}')}}" for n in range(low, low + more + 1)]
        long += [] if ranges else [name]
    assert expand_hosts(",".join(short)) == long


def test_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(UsageError, match="SLURM_STEP_TASKS_PER_NODE=2x3 does not read like"):
        expand_counts("2x3")
