"""The environments that launchers set, whole, in part, and against each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.distributed.launchers import placement, require_task
from pipeline.distributed.placement import NodeOptions, NodePlacement, RankPlacement, combined
from pipeline.errors import UsageError

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
        source=source, node_rank=rank, min_nodes=nodes, max_nodes=nodes, host=host, port=port,
        procs=procs, job=job,
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


def test_bounds_of_an_elastic_kubeflow_job() -> None:
    found = placement(KUBEFLOW | {"PET_NNODES": "2:4", "PET_NPROC_PER_NODE": "auto"})
    assert isinstance(found, NodePlacement)
    assert (found.min_nodes, found.max_nodes, found.procs) == (2, 4, None)


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


def test_one_node_of_kubeflow_says_how_many_processes() -> None:
    found = placement({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"})
    assert isinstance(found, NodePlacement)
    assert (found.max_nodes, found.procs) == (1, 4)


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
        (KUBEFLOW | {"PET_NNODES": "4:2"}, "PET_NNODES=4:2: MIN is above MAX"),
        (KUBEFLOW | {"PET_NODE_RANK": "4"}, "node 4 of 4 (Kubeflow's PET_* variables): node ranks"),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "all"}, "PET_NPROC_PER_NODE=all is neither a number"),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE=0 is neither a number above"),
        (KUBEFLOW | {"PET_MASTER_PORT": "99999"}, "PET_MASTER_PORT=99999, but ports are numbers"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT=, which is not a whole number"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0, but ports are numbers from 1 to 65535"),
        (TASKS | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000, but ports are numbers"),
        (OPEN_MPI | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000, but ports are numbers"),
        (SKYPILOT | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000, but ports are numbers"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4 is set by a launcher of several processes, but not "
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


@pytest.mark.parametrize("command", ["run", "resume", "bench"])
def test_commands_refuse_a_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: x\nstages: {}\n")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    result = CliRunner().invoke(main, [command, "recipe.yaml"])
    assert result.exit_code == 2
    assert "error: OMPI_COMM_WORLD_SIZE=4 is set by a launcher of several" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_batch_script_without_srun_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\nstages: {}\n")
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main, ["run", str(tmp_path / "recipe.yaml")])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: this Slurm job has 2 nodes, but this is the batch script, not a task (start it "
        "with `srun pipe run ...`, or unset SLURM_NNODES)\n"
    )


@pytest.mark.parametrize(
    "variables",
    [{}, BATCH | {"SLURM_NNODES": "1"}, without(BATCH, "SLURM_NNODES"), TASKS,
     BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, without(BATCH, "SLURM_PROCID")],
)  # fmt: skip
def test_these_are_not_batch_scripts_of_several_nodes(variables: Variables) -> None:
    require_task(variables)


OPTIONS = NodeOptions(nodes="2", node_rank=1, rdzv="n0:1234")


def test_options_alone() -> None:
    assert combined(OPTIONS, None) == node("options", 1, 2, "n0", 1234, None)
    assert combined(NodeOptions(), None) is None
    elastic = combined(NodeOptions(nodes="2:4", node_rank=3, rdzv="[fd00::1]:99"), None)
    assert isinstance(elastic, NodePlacement)
    assert (elastic.min_nodes, elastic.max_nodes) == (2, 4)
    assert (elastic.host, elastic.port) == ("fd00::1", 99)


@pytest.mark.parametrize(
    ("rdzv", "said"),
    [("node0", True), ("[fd00::1]", True), ("node0:29400", False), ("[fd00::1]:29400", False)],
)
def test_a_port_that_is_assumed_is_said(
    capsys: pytest.CaptureFixture[str], rdzv: str, said: bool
) -> None:
    found = combined(NodeOptions(nodes="2", node_rank=1, rdzv=rdzv), None)
    assert isinstance(found, NodePlacement)
    assert found.port == 29400
    line = f"--rdzv {rdzv} names no port: using 29400\n"
    assert capsys.readouterr().err == (line if said else "")


def test_options_add_to_a_launcher() -> None:
    found = combined(NodeOptions(rdzv="ib0"), placement(SKYPILOT))
    assert found == node("SkyPilot", 1, 2, "ib0")
    elastic = combined(NodeOptions(nodes="1:2"), placement(SKYPILOT))
    assert isinstance(elastic, NodePlacement)
    assert (elastic.min_nodes, elastic.max_nodes) == (1, 2)


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (NodeOptions(nodes="2"), {}, "--node-rank, --rdzv not given, and no launcher or hostfile"),
        (NodeOptions(nodes="x", node_rank=0, rdzv="h:1"), {}, "--nodes=x is neither a number"),
        (NodeOptions(nodes="2", node_rank=0, rdzv="h:x"), {}, "--rdzv=h:x is not HOST:PORT"),
        (NodeOptions(nodes="0", node_rank=0, rdzv="h:1"), {}, "--nodes=0: must be at least 1"),
        (NodeOptions(nodes="2", node_rank=3, rdzv="h:1"), {}, "--node-rank must be 0 or 1, as "
         "there are 2 nodes"),
        (NodeOptions(nodes="4", node_rank=4, rdzv="h:1"), {}, "--node-rank must be from 0 to 3"),
        (NodeOptions(nodes="3"), SKYPILOT, "node 1 of 3 (the options) contradicts node 1 of 2 "
         "(SkyPilot)"),
        (NodeOptions(node_rank=0), SKYPILOT, "node 0 of 2 (the options) contradicts node 1 of 2"),
        (OPTIONS, TASKS, "this process is rank 3 of 4 (Slurm), so --nodes"),
    ],
)  # fmt: skip
def test_options_against_launchers(options: NodeOptions, variables: Variables, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        combined(options, placement(variables))
    assert words in str(caught.value)


def test_a_hostfile_says_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("worker-1 slots=4\nworker-2 slots=4\n")
    found = combined(NodeOptions(hostfile=file, node_rank=1), None)
    assert found == node(str(file), 1, 2, "worker-1", procs=4)
    with pytest.raises(UsageError, match=r"node 1 of 2 \(.*hosts\) contradicts node 2 of 4"):
        combined(NodeOptions(hostfile=file, node_rank=1), placement(KUBEFLOW))
