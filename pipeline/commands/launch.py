"""`pipe launch`."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands import options
from pipeline.commands.options import PATH, Count, flag, option
from pipeline.errors import UsageError
from pipeline.utils.terminal import hidden_in, shown

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan
    from pipeline.launch.targets import Job, Target

TARGETS = ("slurm", "kubeflow", "jobset", "kuberay", "ray", "skypilot", "dstack", "docker")
FLAGS = {
    "kind": "--gpu-kind", "image": "--image", "setup": "--setup", "mounts": "--mount",
    "time_limit": "--time-limit", "grace": "--grace", "tasks": "--tasks", "extra": "--extra",
}  # fmt: skip
"""Field of a job -> its option; not every target has a use for it."""
DEFAULTS: dict[str, Any] = {"grace": 300, "tasks": "node"}


@click.command("launch")
@options.recipe
@option("--target", "Scheduler or platform that runs the job.", type=click.Choice(TARGETS),
        required=True)  # fmt: skip
@flag("--print", "shows", "Print the script on standard output.")
@flag("--submit", "Submit the script with the target's client.")
@option("--run-dir",
        "Folder of the run, on a file system that all nodes share. A restarted job continues it.",
        type=PATH, required=True)  # fmt: skip
@option("--nodes", "Number of nodes.", metavar="N", show_default="launch.nodes")
@option("--gpus", "GPUs per node.", type=Count(0), show_default="launch.procs")
@option("--gpu-kind", "kind", "Kind of GPU in the target's words, such as H100.")
@option("--image", "Container image that holds this program (on Slurm: through pyxis).")
@option("--setup", "Command that installs this program, or activates it on Slurm.")
@option("--mount", "mounts",
        "Mount a folder (Kubernetes: volume claim, SkyPilot: bucket). May be repeated.",
        multiple=True, metavar="SOURCE:TARGET")  # fmt: skip
@option("--time-limit", "Time limit in Slurm's format, such as 24:00:00.")
@option("--grace", "Seconds before the end at which to save and stop.", type=Count(1),
        show_default=str(DEFAULTS["grace"]))  # fmt: skip
@option("--tasks", "Start one task per node, which starts its ranks, or one per GPU.",
        type=click.Choice(["node", "gpu"]), show_default=DEFAULTS["tasks"])  # fmt: skip
@option("--extra", "Option for the target, such as --partition=a. May be repeated.", multiple=True)
@options.pinned
@options.trust
def launch(
    recipe: Path, overrides: tuple[str, ...], target: str, shows: bool, submit: bool,
    run_dir: Path, nodes: str | None, gpus: int | None, **given: Any,
) -> None:  # fmt: skip
    """Print or submit the job script that runs RECIPE on a scheduler.

    OVERRIDES change the recipe first, such as train.steps=50. The recipe is checked. Environment
    variables that it reads are passed by name; the script holds none of their values.
    """
    from pipeline.distributed.placement import node_count
    from pipeline.importing.translator import plan_recipe
    from pipeline.launch.targets import TARGETS as KNOWN
    from pipeline.launch.targets import with_absolute_paths
    from pipeline.utils.hub import path_problems

    if shows == submit:
        raise UsageError("use exactly one of --print and --submit")
    for problem in path_problems("", str(run_dir)):
        raise UsageError(f"--run-dir: {problem.message}", hint=problem.hint)
    kind = KNOWN[target]
    mounted = _mounted(target, kind, given)
    if kind.forgets and (".." in run_dir.parts or not any(map(run_dir.is_relative_to, mounted))):
        raise UsageError(
            f"--run-dir {run_dir} is in none of the mounted folders, so the run would be gone with "
            f"{target}'s container",
            hint="--mount SOURCE:TARGET, and a --run-dir in TARGET",
        )
    if nodes is not None:
        overrides = (*overrides, f"launch.nodes={node_count(nodes, '--nodes')}")
    if kind.engine:
        overrides = (*overrides, f"launch.engine={kind.engine}")
    plan = plan_recipe(recipe, overrides, forecast=True)
    if not kind.takes_folder:  # the current folder may be another one there
        overrides = tuple(map(with_absolute_paths, overrides))
        run_dir = run_dir.absolute() if kind.brings else run_dir
    # the recipe is at the same absolute place there, or in the folder that goes along
    place = recipe.absolute()
    if kind.takes_folder and place.is_relative_to(Path.cwd()):
        place = place.relative_to(Path.cwd())
    elsewhere = bool(given["image"]) or kind.forgets or kind.fresh
    if kind.engine:
        given["tasks"] = "engine"
    job = _job(
        plan, gpus, given | _surroundings(target, kind, plan, run_dir, mounted, elsewhere),
        ["run", str(place), *overrides, "--run-dir", str(run_dir), *options.permissions()],
    )  # fmt: skip
    lacking = next((n for n in kind.needs_with_gpus if job.gpus and not getattr(job, n)), None)
    if lacking is not None:
        raise UsageError(f"{target} needs {FLAGS[lacking]} for a job on GPUs")
    if target == "docker" and job.nodes > 1:
        raise UsageError(f"docker runs on one machine, and this is for {job.nodes} nodes")
    text = kind.write(job)
    _require_shown(text)
    click.echo(text, nl=False) if shows else _submit(target, kind, text, job)


def _mounted(target: str, kind: Target, given: dict[str, Any]) -> list[str]:
    """Return the folders in the container that mounts bring. Raises UsageError for options that the
    target has no use for or lacks, and for values that would end up in the script as something
    else."""
    from pipeline.launch.targets import LINE

    for name, words in FLAGS.items():
        if given[name] and name not in kind.uses:
            raise UsageError(f"{words} has no effect on {target}", hint="leave it out")
        if not given[name] and name in kind.needs:
            raise UsageError(f"{target} needs {words}")
    if kind.fresh and not (given["image"] or given["setup"]):
        hint = "which say how to install this program on its machines"
        raise UsageError(f"{target} needs --image, or --setup", hint=hint)
    forms = {"mounts": kind.mount, **kind.forms}
    for name in ("kind", "image", "mounts", "time_limit", "extra"):
        values = given[name] if isinstance(given[name], tuple) else (given[name],)
        for value in filter(None, values):
            for pattern, words in (LINE, forms.get(name, LINE)):
                if not pattern.fullmatch(value):
                    raise UsageError(f"{FLAGS[name]} {value!r} is not {words}")
    found = (kind.mount[0].fullmatch(mount) for mount in given["mounts"])
    return [match["target"] for match in found if match]


def _surroundings(
    target: str, kind: Target, plan: Plan, run_dir: Path, mounted: Sequence[str], elsewhere: bool
) -> dict[str, Any]:
    """Return the fields of a job about what is here, and say what the script does not bring.
    `elsewhere` is whether it runs in a container, or on a machine of another kind."""
    from pipeline.launch.targets import activation, named_paths, within
    from pipeline.recipe.nodes import texts_in

    here = str(Path.cwd())
    paths, missing = named_paths(plan.recipe)
    if kind.takes_folder:
        written = "".join(path.read_text("utf-8") for path in plan.recipe.source_files)
        paths = [path for path in paths if not within(path, [here]) or path in written]
    paths = [path for path in paths if not within(path, mounted)]
    ours = {str(path.absolute()) for path in plan.recipe.source_files}
    left = [path for path in missing if not within(path, mounted)]
    if not kind.brings:
        left += [path for path in paths if path not in ours or "files" not in kind.uses]
    texts = texts_in(plan.recipe.public().get("stages", {})) if elsewhere else ()
    # `~` is another folder in a container
    left += dict.fromkeys(text for text in texts if text == "~" or text.startswith("~/"))
    for path in left:
        click.echo(f"warning: {path} is named by the recipe, and {target} has to find it", err=True)
    return {
        "paths": paths,
        "files": [path for path in paths if path in ours],
        "folder": here,
        "run_dir": "" if within(str(run_dir), mounted) else str(run_dir),
        "activation": activation(),
    }


def _job(plan: Plan, gpus: int | None, given: dict[str, Any], arguments: Sequence[str]) -> Job:
    from pipeline.launch.targets import Job

    launch, by_engine = plan.recipe.launch, given["tasks"] == "engine"
    if launch.engine and not by_engine:
        raise UsageError(
            f"the recipe has launch.engine: {launch.engine}, which this target does not run",
            hint="add launch.engine=null, or take a target of that engine",
        )
    if by_engine and launch.ranks is None:
        raise UsageError("the number of ranks is not known", hint="add launch.workers=N")
    if launch.device == "cpu":
        if gpus:
            raise UsageError(f"--gpus {gpus}, but the recipe computes on CPUs (launch.device: cpu)")
    else:
        gpus = launch.procs if gpus is None else gpus
        if gpus is None:
            raise UsageError("the number of GPUs of a node is not known", hint="give --gpus")
    if launch.procs is not None and gpus and gpus != launch.procs:
        raise UsageError(
            f"--gpus {gpus}, but launch.procs is {launch.procs}: each GPU has one process",
            hint=f"add launch.procs={gpus}",
        )
    texts = dict.fromkeys(("kind", "image", "setup", "time_limit"), "")
    fields = {
        name: value or {**texts, **DEFAULTS}.get(name, value) for name, value in given.items()
    }
    return Job(
        name=plan.recipe.name, arguments=arguments, nodes=launch.nodes or 1,
        ranks=launch.ranks or plan.view.procs, fewest_ranks=launch.fewest or plan.view.procs,
        procs=launch.procs, gpus=gpus or 0,
        cpus=(launch.resources_per_worker or {}).get("CPU", 1.0), env=plan.recipe.env, **fields,
    )  # fmt: skip


def _require_shown(text: str) -> None:
    """Raise UsageError where the script would be printed otherwise than it is."""
    if names := hidden_in(text):
        raise UsageError(
            f"the script would hold the value of {', '.join(names)}, which is not written down",
            hint="remove it from the recipe's name, the overrides and the options",
        )
    if shown(text) != text:
        raise UsageError(
            "the script would hold control characters, or the password of an address",
            hint="remove them from the overrides and the options",
        )


def _submit(target: str, kind: Target, text: str, job: Job) -> None:
    """Hand the text to the target's client, with a secret that the nodes share."""
    from pipeline.distributed.environment import TOKEN

    if which(kind.client) is None:
        raise UsageError(
            f"--submit needs {kind.client}, which is not installed here",
            hint=f"--print writes what {target} wants",
        )
    environment = {TOKEN: secrets.token_hex(16)} if job.needs_token else {}
    environment |= os.environ
    before = kind.prepare(job)
    if before:
        code = subprocess.run(["sh", "-c", before], env=environment, check=False).returncode
        if code:
            raise UsageError(f"exit code {code} of: {before}")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        names = job.variables if kind.env_option else []
        by_name = [word for name in names for word in (kind.env_option, name)]
        values = {"{file}": [file.name], "{env}": by_name}
        command = [word for part in kind.submit for word in values.get(part, [part])]
        whole = None if "{file}" in kind.submit else text
        done = subprocess.run(command, input=whole, text=True, env=environment, check=False)
    if kind.carries_out:
        sys.exit(done.returncode)
    if done.returncode:
        raise UsageError(f"{kind.client} refused it: exit code {done.returncode}")
