"""Scripts and files of `pipe launch`: read by the targets' own tools, and safe with any name."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli import main
from pipeline.commands.launch import TARGETS as NAMES
from pipeline.distributed.environment import TOKEN
from pipeline.launch.targets import TARGETS, Job, label
from pipeline.utils.foreign import TRUST_CODE, TRUST_PICKLE
from pipeline.utils.hub import PINNED
from tests.support.models import tiny_llama_config
from tests.support.tier import examples

RECIPE = str(Path(__file__).parents[3] / "recipes" / "llama8b_fsdp.yaml")
MOUNT = ["--mount", "/data:/shared"]
DOCKER = ["--image", "img:1", *MOUNT]
NEEDED = {
    "slurm": [], "ray": [], "docker": DOCKER,
    **{name: ["--image", "img:1"] for name in ("kubeflow", "jobset", "kuberay")},
    "skypilot": ["--gpu-kind", "H100", "--setup", "pip install ./wheel"],
    "dstack": ["--setup", "pip install ./wheel", *MOUNT],
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (TRUST_PICKLE, TRUST_CODE):
        monkeypatch.delenv(variable, raising=False)


def launch(target: str, *options: str, recipe: str = RECIPE) -> Result:
    arguments = ["launch", recipe, "--target", target, "--run-dir", "/shared/run", *options]
    return CliRunner().invoke(main, arguments)


def printed_of(recipe: str | Path, target: str, *options: str) -> Result:
    result = launch(target, "--print", *NEEDED[target], *options, recipe=str(recipe))
    assert result.exit_code == 0, result.stderr
    return result


def printed(target: str, *options: str) -> str:
    return printed_of(RECIPE, target, *options).stdout


def job(**fields: Any) -> Job:
    known: dict[str, Any] = {
        "name": "a", "arguments": ("run", "r.yaml"), "nodes": 1, "ranks": 8,
        "fewest_ranks": 8, "procs": 8, "gpus": 8, "cpus": 1.0, "kind": "H100", "image": "img",
        "setup": "", "mounts": (), "time_limit": "", "grace": 300, "tasks": "node", "env": (),
        "extra": (), "paths": (), "files": (),
        "folder": "/work", "run_dir": "", "activation": (),
    }  # fmt: skip
    return Job(**(known | fields))


def test_pods_of_ray_have_the_cores_that_workers_reserve() -> None:
    options = ("--nodes", "2", "launch.procs=4", "launch.resources_per_worker={CPU: 2.5, GPU: 1}")
    [group] = yaml.safe_load(printed("kuberay", *options))["spec"]["rayClusterSpec"][
        "workerGroupSpecs"
    ]
    assert group["rayStartParams"]["num-cpus"] == "10"


def test_the_names_are_those_of_the_targets() -> None:
    assert list(NAMES) == list(TARGETS)


SCRIPTS = {
    "slurm": [
        "--nodes", "2", "--time-limit", "8:00:00", "--grace", "120", "--image", "a#b",
        "--mount", "/x:/y", "--gpu-kind", "h100", "--extra=--partition=big",
    ],
    "slurm-gpu": [
        "--nodes", "2", "--tasks", "gpu", "--time-limit", "2-12", "--trust-pickle",
        "--trust-remote-code",
    ],
    "kubeflow": ["--nodes", "2", "--mount", "claim:/shared"],
    "jobset": ["--nodes", "2", "--mount", "claim:/shared"],
    "kuberay": ["--nodes", "2", "--mount", "claim:/shared"],
    "ray": ["--nodes", "2"],
    "skypilot": ["--nodes", "2", "--mount", "s3://bucket/runs:/shared", "--mount", "./data:/data"],
    "dstack": ["--nodes", "2", "--gpu-kind", "H100"],
    "docker": ["--mount", "/a:/b:ro,z", "--grace", "60", "--extra=--cpus=8"],
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_whole_scripts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.chdir(tmp_path)
    text = printed(name.partition("-")[0], *SCRIPTS[name])
    expected = (Path(__file__).parent / "scripts" / f"{name}.txt").read_text("utf-8")
    text = text.replace(str(Path(RECIPE).parent), "RECIPES").replace(str(tmp_path), "HERE")
    assert text == expected


def test_nodes_of_a_slurm_job_share_a_secret() -> None:
    lines = printed("slurm", "--nodes", "2").splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("PIPE_RDZV_TOKEN="))
    script = "\n".join([*lines[first : first + 2], 'sh -c "echo \\$PIPE_RDZV_TOKEN"'])
    secrets = [subprocess.check_output(["bash", "-c", script], text=True) for _ in range(2)]
    assert all(re.fullmatch(r"[0-9a-f]{32}\n", secret) for secret in secrets)
    assert secrets[0] != secrets[1]


KEEPS = f"""#!{sys.executable}
import os, sys
words, here = sys.argv[1:], os.path.dirname(__file__)
making, kept = words[:2] == ["create", "secret"], os.path.join(here, "kept")
with open(os.path.join(here, "calls"), "a") as calls:
    given = sys.stdin.read() if making else ""
    print(words, given.strip(), os.environ.get("PIPE_RDZV_TOKEN"), file=calls, sep="|")
if making:
    open(kept, "w").close()
sys.exit(words[:2] == ["get", "secret"] and not os.path.exists(kept))
"""
"""A client that writes down its words, what it reads and the secret, and keeps one secret."""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that installs a client: its name, and its program."""
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def install(name: str, program: str) -> None:
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)

    return install


def submitted(target: str, client: Callable[[str, str], None], folder: Path) -> list[list[str]]:
    """Submit a job of two nodes; return the calls of the client: words, input, secret."""
    client(TARGETS[target].client, KEEPS)
    (folder / "calls").unlink(missing_ok=True)
    done = launch(target, "--submit", "--nodes", "2", *NEEDED[target])
    assert done.exit_code == 0, done.stderr
    return [line.split("|") for line in (folder / "calls").read_text().splitlines()]


def test_kubeflows_secret_is_made_once(client: Callable[[str, str], None], tmp_path: Path) -> None:
    got, made, job_ = submitted("kubeflow", client, tmp_path)
    assert got[0] == "['get', 'secret', 'llama8b-fsdp-rendezvous']"
    assert re.fullmatch(r"[0-9a-f]{32}", made[1])
    assert made[1] not in made[0]  # the words of a command are there for all to read
    assert job_[0].startswith("['create', '-f', ")
    again = submitted("kubeflow", client, tmp_path)
    assert [call[0] for call in again][:1] == [got[0]]
    assert len(again) == 2


@pytest.mark.parametrize("target", ["skypilot", "dstack"])
def test_clouds_get_a_secret_of_the_environment(
    target: str, client: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((words, _, first),) = submitted(target, client, tmp_path)
    ((_, _, second),) = submitted(target, client, tmp_path)
    assert all(re.fullmatch(r"[0-9a-f]{32}", secret) for secret in (first, second))
    assert first != second
    assert first not in words
    assert ("'--secret', 'PIPE_RDZV_TOKEN'" in words) == (target == "skypilot")
    monkeypatch.setenv(TOKEN, "one of my own")
    assert submitted(target, client, tmp_path)[0][2] == "one of my own"


@pytest.mark.parametrize("target", ["kubeflow", "jobset", "skypilot", "dstack"])
def test_the_printed_line_makes_the_secret(target: str) -> None:
    text = printed(target, "--nodes", "2")
    (line,) = re.findall(r"^#   (export PIPE_RDZV_TOKEN=.*)$", text, re.MULTILINE)
    script = f'{line}; sh -c "echo \\$PIPE_RDZV_TOKEN"'
    secret = subprocess.check_output(["sh", "-c", script], text=True)
    assert re.fullmatch(r"[0-9a-f]{32}\n", secret)
    assert TOKEN not in printed(target)


@pytest.mark.parametrize("target", ["slurm", "docker", "ray"])
def test_shells_accept_the_script(target: str, tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(printed(target))
    subprocess.run(["bash", "-n", str(file)], check=True)
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("bash reads it; shellcheck is not installed here")
    subprocess.run([checker, "--exclude=SC1091", str(file)], check=True)


@pytest.mark.parametrize("target", NAMES)
def test_values_of_the_environment_stay_out(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MY_SECRET", "HF_TOKEN"):
        monkeypatch.setenv(name, "hunter2hunter2")
    recipe = tmp_path / "r.yaml"
    path = "stages: {model: {path: '${oc.env:MY_SECRET}'}}"
    recipe.write_text(f"extends: {RECIPE}\nenv: [MY_SECRET]\n{path}\n")
    text = printed_of(recipe, target).stdout
    assert "hunter2" not in text
    assert target == "slurm" or "MY_SECRET" in text


@pytest.mark.parametrize(
    ("field", "options", "words"),
    [
        ("name: x-${oc.env:MY_PLACE}", [], "the script would hold the value of $MY_PLACE"),
        ("stages: {model: {path: '${oc.env:MY_PLACE}'}}", ["--mount", "/a1b2c3d4e5:/data"],
         "the script would hold the value of $MY_PLACE"),
        ("name: x", ["--image", "a\u202eb"], "the script would hold control characters"),
    ],
)  # fmt: skip
def test_a_script_that_would_be_shown_otherwise_is_refused(
    field: str, options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Printing would put the variable's name in its place, which containers take as it stands.
    monkeypatch.setenv("MY_PLACE", "a1b2c3d4e5")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"extends: {RECIPE}\nenv: [MY_PLACE]\n{field}\n")
    result = launch("docker", "--print", *DOCKER, *options, recipe=str(recipe))
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama8b_fsdp", "llama8b-fsdp"),
        ("8B.model", "run-8b-model"),
        ("...", "run"),
        ("a" * 40 + "-b", "a" * 40),  # cut after the dash, which must not be the last
    ],
)
def test_names_are_labels_of_dns(name: str, expected: str) -> None:
    assert label(name, 41) == expected
    assert label(name, 50) == (expected if len(name) < 42 else f"{expected}-b")
    given_ = [TARGETS[target].write(job(name=name)) for target in ("dstack", "kubeflow")]
    dstack, kubeflow = map(yaml.safe_load, given_)
    assert (dstack["name"], kubeflow["metadata"]["name"]) == (label(name, 41), label(name, 50))


@given(st.text(st.sampled_from("aB9._-"), min_size=1, max_size=60))
def test_any_recipe_name_becomes_a_label(name: str) -> None:
    assert re.fullmatch("[a-z][a-z0-9-]{0,39}[a-z0-9]", label(name, 41))


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A recipe that names a base, a model whose files are links, and files of data."""
    blobs, model, data = (tmp_path / name for name in ("blobs", "hub/model", "data"))
    for folder in (blobs, model, data):
        folder.mkdir(parents=True)
    (blobs / "abc").write_text(json.dumps(tiny_llama_config()))
    (model / "config.json").symlink_to(blobs / "abc")
    (data / "a.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "base.yaml").write_text(f"extends: {RECIPE}\n")
    recipe = tmp_path / "r.yaml"
    fields = {
        "model": {"path": str(model), "init": "random", "revision": None,
                  "attention": "sdpa"},
        "data": {"files": f"{data}/*.jsonl"},
        "checkpoint": {"folder": f"{tmp_path}/kept"},
    }  # fmt: skip
    head = {"extends": "./base.yaml", "name": "named", "stages": fields}
    recipe.write_text(yaml.safe_dump(head))
    return recipe


def brought(recipe: Path) -> list[str]:
    """The paths that a container needs of it."""
    base, folder = Path(RECIPE).with_name("llama8b_ddp.yaml"), recipe.parent
    found = [recipe, folder / "base.yaml", RECIPE, base, folder / "hub/model", folder / "data"]
    return [str(path) for path in (*found, folder / "blobs")]


def test_docker_brings_what_the_recipe_names(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(named.parent)
    result = printed_of(Path("r.yaml"), "docker")
    words = shlex.split(result.stdout.splitlines()[-1])
    volumes = [words[n + 1] for n, word in enumerate(words) if word == "--volume"]
    assert sorted(volumes) == sorted(["/data:/shared", *(f"{p}:{p}" for p in brought(named))])
    assert words[words.index("--workdir") + 1] == str(named.parent)
    assert words[-4:] == ["run", str(named), "--run-dir", "/shared/run"]
    assert f"warning: {named.parent}/kept is named by the recipe, and docker" in result.stderr
    covered = printed_of(named, "docker", "--mount", f"{named.parent}:{named.parent}")
    assert str(named.parent / "data") not in covered.stdout
    assert covered.stderr == ""


def test_a_container_of_slurm_sees_the_run_and_what_the_recipe_names(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(named.parent)
    image = ["slurm", "--image", "a"]
    (mounts,) = re.findall(r"--container-mounts=(\S+)", printed_of(named, *image).stdout)
    own = [f"{path}:{path}" for path in (*brought(named), "/shared/run")]
    assert sorted(mounts.split(",")) == sorted(own)
    kept = printed_of(named, *image, "--mount", "/fs:/shared").stdout
    assert "/shared/run:" not in kept
    assert "mkdir" not in kept
    text = printed_of(named, *image, "--run-dir", "runs/my run").stdout
    folder = f"{named.parent}/runs/my run"
    assert f"mkdir -p '{folder}'\n" in text
    assert f"{folder}:{folder}'" in text
    assert f"--run-dir '{folder}'" in text


def test_a_batch_script_may_be_submitted_from_anywhere_and_refuses_the_same(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(named.parent)
    monkeypatch.setenv(PINNED, "0")
    call = f"  pipe run {named} --run-dir {named.parent}/runs/a"
    options = ["slurm", "--run-dir", "runs/a"]
    assert f"{call}\n" in printed_of(Path("r.yaml"), *options).stdout
    assert f"{call} --pinned\n" in printed_of(Path("r.yaml"), *options, "--pinned").stdout


@pytest.mark.parametrize("target", ["slurm", "docker", "kubeflow"])
def test_paths_of_the_command_line_are_the_same_in_a_container(
    named: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Its current folder is another one."""
    monkeypatch.chdir(named.parent)
    (named.parent / "my data").mkdir()
    files = [named.parent / "my data" / name for name in ("a.jsonl", "b: c.jsonl")]
    for number, file in enumerate(files):
        file.write_text(json.dumps({"messages": [], "n": number}) + "\n")
    overrides = [
        "data.files=['./my data/a.jsonl', './my data/b: c.jsonl']",
        "checkpoint.folder=./kept",
    ]
    image = ["--image", "a"] if target == "slurm" else []
    result = printed_of(Path("r.yaml"), target, *image, *overrides, "checkpoint.every=5")
    if target == "kubeflow":
        words = yaml.safe_load(result.stdout)["spec"]["trainer"]["command"]
    else:
        words = shlex.split(result.stdout[result.stdout.rindex("pipe run ") :].splitlines()[0])
    given_ = dict(word.split("=", 1) for word in words if re.match(r"[a-z]+\.[a-z]+=", word))
    assert yaml.safe_load(given_["data.files"]) == [str(file) for file in files]
    assert given_["checkpoint.folder"] == f"{named.parent}/kept"
    assert given_["checkpoint.every"] == "5"


@pytest.mark.parametrize("target", ["slurm", "docker", "skypilot", "dstack"])
def test_paths_at_home_are_warned_of_where_home_is_elsewhere(
    named: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setenv("HOME", str(named.parent))
    monkeypatch.chdir(named.parent)
    warning = f"warning: ~/kept is named by the recipe, and {target} has to find it\n"
    kept = "checkpoint.folder=~/kept"
    options = ["--image", "a"] if target == "slurm" else []
    assert warning in printed_of(named, target, *options, kept).stderr
    assert target != "slurm" or warning not in printed_of(named, target, kept).stderr


def test_machines_of_clouds_get_the_recipe(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(named.parent)
    found = yaml.safe_load(printed_of(named, "skypilot", "--run-dir", "runs/x").stdout)
    written = {path for path in brought(named) if path in named.read_text()}
    shipped = {path for path in brought(named) if not path.startswith(str(named.parent))}
    # The current folder goes along; what the recipe names there by an absolute path does not.
    assert found["file_mounts"] == {path: path for path in written | shipped}
    assert found["run"] == "pipe run r.yaml --run-dir runs/x\n"
    task = yaml.safe_load(printed_of(named, "dstack").stdout)
    assert task["files"] == [f"{path}:{path}" for path in brought(named) if path.endswith(".yaml")]
    said = printed_of(named, "dstack").stderr
    assert f"warning: {named.parent}/data is named by the recipe, and dstack has to find it" in said


def test_slurm_activates_the_environment_and_asks_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / "my env"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text("export FOUND=yes\n")
    monkeypatch.setattr(sys, "prefix", str(venv))
    text = printed("slurm")
    assert f". '{venv}/bin/activate'\n" in text
    stand_in = "srun() { echo $FOUND; }; SLURM_CPUS_PER_TASK=1\n"
    done = subprocess.run(["bash", "-c", stand_in + text], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "yes\n")
    assert "activate" not in printed("slurm", "--image", "a")
    own = printed("slurm", "--setup", "module load cuda", "--extra=--mem=64G")
    assert 0 < own.index("\nmodule load cuda\n") < own.index(f"\n. '{venv}/bin/activate'\n")
    other = printed("slurm", "--setup", ". /other/bin/activate")
    assert re.findall(r"^\. .*$", other, re.MULTILINE) == [". /other/bin/activate"]
    assert re.findall(r"^#SBATCH (--mem.*)$", own, re.MULTILINE) == ["--mem=64G"]
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setenv("CONDA_PREFIX", sys.base_prefix)
    monkeypatch.setenv("CONDA_EXE", "/opt/conda/bin/conda")
    conda = printed("slurm")
    assert 'eval "$(/opt/conda/bin/conda shell.posix hook)"\n' in conda
    assert f"conda activate {sys.base_prefix}\n" in conda
    monkeypatch.delenv("CONDA_PREFIX")
    assert "activate" not in printed("slurm")


@pytest.mark.parametrize("limit", ["90", "24:00:00", "2-12:30:00"])
def test_limits_of_time(limit: str) -> None:
    assert f"--time={limit}\n" in printed("slurm", "--time-limit", limit)


QUOTED = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), min_size=1, max_size=12)


@examples(25)
@given(st.lists(QUOTED, min_size=1, max_size=3), QUOTED)
def test_a_shell_gives_pipe_the_same_arguments(arguments: list[str], mount: str) -> None:
    given_ = ["run", *arguments]
    fields = {"arguments": given_, "mounts": [f"{mount}:/x"], "image": mount}
    stand_in = f'pipe() {{ {sys.executable} -c {_SHOW} "$@"; }}; srun() {{ shift 4; "$@"; }};\n'
    assert _run(stand_in + TARGETS["slurm"].write(job(**fields))) == given_
    docker = f'docker() {{ {sys.executable} -c {_SHOW} "$@"; }};\n'
    text = TARGETS["docker"].write(job(**fields)).replace("exec docker", "docker")
    shown = _run(docker + text)
    assert shown[-len(given_) - 2 :] == [mount, "pipe", *given_]
    assert shown[shown.index("--volume") + 1] == f"{mount}:/x"
    for target in ("skypilot", "dstack"):
        found = yaml.safe_load(TARGETS[target].write(job(**fields)))
        command = found["run"] if target == "skypilot" else found["commands"][-1]
        assert _run(stand_in + command) == given_
    found = yaml.safe_load(TARGETS["kubeflow"].write(job(**fields)))
    assert found["spec"]["trainer"]["command"] == ["pipe", *given_]


_SHOW = "'import json,sys; print(json.dumps(sys.argv[1:]))'"


def _run(script: str) -> list[str]:
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    shown: list[str] = json.loads(done.stdout)
    return shown


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("slurm", "--submit", "use exactly one of --print and --submit"),
        ("skypilot", "--tasks gpu", "--tasks has no effect on skypilot"),
        ("skypilot", "--image a", "skypilot needs --gpu-kind for a job on GPUs"),
        ("skypilot", "--gpu-kind A", "skypilot needs --image, or --setup"),
        ("dstack", "", "dstack needs --image, or --setup"),
        ("docker", "--image a --mount /a:/shared --setup a", "--setup has no effect on docker"),
        ("docker", "", "docker needs --image"),
        ("docker", "--image a --mount /a:/shared --nodes 2", "docker runs on one machine"),
        ("docker", "--image a", "--run-dir /shared/run is in none of the mounted"),
        ("docker", "--image a --mount /shared:/x", "is in none of the mounted"),
        ("docker", "--image a --mount data", "'data' is not SOURCE:TARGET"),
        ("dstack", "--setup a", "be gone with dstack's container"),
        ("kubeflow", "--image a --mount /data:/x", "'/data:/x' is not CLAIM"),
        ("kubeflow", "--image a --mount data", "'data' is not CLAIM:TARGET"),
        ("skypilot", "--setup a --mount /a:/b:ro", "'/a:/b:ro' is not S"),
        ("slurm", "--time-limit '1 day'", "'1 day' is not [DAYS-]HOURS:MINUTES"),
        ("slurm", "--time-limit '1\nrm -rf x'", "is not one line"),
        ("slurm", "--time-limit 5", "would be stopped at its start, --grace 300 s"),
        ("slurm", "--time-limit 1:00:00 --grace 7200", "(raise --time-limit, or lower --grace)"),
        ("slurm", "--run-dir s3:/b/run", "--run-dir: s3:/b/run is an address"),
        ("slurm", "--extra partition=a", "'partition=a' is not an option"),
        ("slurm", "--gpu-kind 'a\nb'", "is not one line"),
        ("slurm", "--gpus 4", "(add launch.procs=4)"),
        ("slurm", "--nodes 2:4", "--nodes=2:4: nodes that `pipe` starts are a fixed number"),
        ("slurm", "--nodes two", "--nodes=two is not a number of nodes, such as 2"),
        ("ray", "--tasks gpu", "--tasks has no effect on ray"),
        ("slurm", "launch.engine=ray", "launch.engine: ray, which this target does not run"),
        ("ray", "launch.procs=null", "the number of ranks is not known (add launch.workers=N)"),
    ],
)
def test_options_that_do_not_fit(target: str, options: str, words: str) -> None:
    result = launch(target, "--print", *shlex.split(options))
    assert result.exit_code == 2
    assert words in result.stderr


def test_submit_hands_the_script_to_the_client(
    client: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, words in (
        ([], "use exactly one of --print and --submit"),
        (["--submit", "train.stps=5"], "train.stps: unknown field"),
    ):
        wrong = launch("slurm", *options)
        assert (wrong.exit_code, wrong.stdout) == (2, "")
        assert words in wrong.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = launch("slurm", "--submit")
    assert missing.exit_code == 2
    assert "--submit needs sbatch, which is not installed here" in missing.stderr
    client("sbatch", f"#!/bin/sh\n/bin/cat > {tmp_path}/given\n")
    assert launch("slurm", "--submit").exit_code == 0
    assert (tmp_path / "given").read_text() == printed("slurm")
    client("sbatch", "#!/bin/sh\nexit 3\n")
    refused = launch("slurm", "--submit")
    assert refused.exit_code == 2
    assert "sbatch refused it: exit code 3" in refused.stderr


def test_skypilot_hears_which_variables_to_take(
    client: Callable[[str, str], None], tmp_path: Path
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"extends: {RECIPE}\nenv: [FIRST, SECOND]\n")
    client("sky", f'#!/bin/sh\necho "$@" > {tmp_path}/given\n')
    done = launch("skypilot", "--submit", *NEEDED["skypilot"], recipe=str(recipe))
    assert done.exit_code == 0, done.stderr
    words = (tmp_path / "given").read_text().split()
    assert words[:-1] == ["jobs", "launch", "--yes", "--secret", "FIRST", "--secret", "SECOND"]


def test_docker_carries_the_run_out_and_ends_as_it_does(client: Callable[[str, str], None]) -> None:
    client("docker", "#!/bin/sh\nexit 75\n")
    assert launch("docker", "--submit", *DOCKER).exit_code == 75


RAY_JOB = {
    "activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata",
    "clusterSelector", "submitterConfig", "managedBy", "deletionStrategy", "entrypoint",
    "runtimeEnvYAML", "jobId", "submissionMode", "entrypointResources", "entrypointNumCpus",
    "entrypointNumGpus", "ttlSecondsAfterFinished", "shutdownAfterJobFinishes", "suspend",
}  # fmt: skip
"""Fields of a RayJob's spec (KubeRay, ray-operator/apis/ray/v1/rayjob_types.go), which has no
parser in Python; of its cluster, and of a group of pods."""
RAY_CLUSTER = {"headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling"}
RAY_GROUP = {
    "groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template",
}  # fmt: skip
PARSERS = {
    "kubeflow": ("kubeflow-trainer-api==2.2.1", """
import json, sys, yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
given = yaml.safe_load(open(sys.argv[1]))
kept = TrainerV1alpha1TrainJob.from_dict(given).to_dict()
assert json.dumps(kept, sort_keys=True) == json.dumps(given, sort_keys=True), (kept, given)
"""),
    "jobset": ("kubeflow-trainer-api==2.2.1", """
import json, sys, yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
given = yaml.safe_load(open(sys.argv[1]))
kept = JobsetV1alpha2JobSet.from_dict(given).to_dict()
assert json.dumps(kept, sort_keys=True) == json.dumps(given, sort_keys=True), (kept, given)
"""),
    "kuberay": ("kubeflow-trainer-api==2.2.1", f"""
import json, sys, yaml
from kubeflow_trainer_api.models import IoK8sApiCoreV1PodTemplateSpec as Pod
given = yaml.safe_load(open(sys.argv[1]))
assert (given["apiVersion"], given["kind"]) == ("ray.io/v1", "RayJob"), given
spec, cluster = given["spec"], given["spec"]["rayClusterSpec"]
assert spec.keys() <= {RAY_JOB!r}, spec.keys()
assert cluster.keys() <= {RAY_CLUSTER!r}, cluster.keys()
for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
    assert group.keys() <= {RAY_GROUP!r}, group.keys()
    assert all(type(value) is str for value in group["rayStartParams"].values()), group
    kept = Pod.from_dict(group["template"]).to_dict()
    assert json.dumps(kept, sort_keys=True) == json.dumps(group["template"], sort_keys=True)
assert yaml.safe_load(spec["runtimeEnvYAML"]).keys() == {{"env_vars"}}, spec
"""),
    "skypilot": ("skypilot>=0.14", """
import sys, sky, yaml
given = yaml.safe_load(open(sys.argv[1]))
task = sky.Task.from_yaml_config(given, secrets_overrides=[("PIPE_RDZV_TOKEN", "x")])
assert task.num_nodes == 2 and task.run.startswith("pipe run "), task
assert "H100" in str(task.resources), task.resources
(place, storage), = task.storage_mounts.items()
assert (place, storage.source) == ("/shared", "s3://bucket/runs"), task.storage_mounts
assert storage.mode.value == "MOUNT", storage
"""),
    "dstack": ("dstack>=0.22", """
import sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
task = parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
assert task.nodes == 2 and task.commands[-1].startswith("pipe run "), task
assert task.resources.gpu.count.min == 8, task.resources
"""),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("target", PARSERS)
def test_the_targets_own_parser(target: str, tmp_path: Path) -> None:
    package, program = PARSERS[target]
    python, file = tmp_path / "bin" / "python", tmp_path / "job.yaml"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True)
    install = [str(python), "-m", "pip", "install", "-q", package, "pyyaml"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{package} cannot be installed: {done.stderr.strip()[-200:]}")
    place = "s3://bucket/runs" if target == "skypilot" else "place"
    file.write_text(printed(target, "--nodes", "2", "--mount", f"{place}:/shared"))
    done = subprocess.run(
        [str(python), "-c", program, str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
