"""Count the functions of this project that live processes enter on the main ways through the code.

    python benchmarks/route.py [--names]

A tiny model is trained by FSDP on two ranks and stopped by SIGTERM, then resumed by DDP on three.
Counted are functions of `pipeline` and `stages`, each once: not class bodies, not lambdas.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from tables import markdown

ROOT = Path(__file__).resolve().parents[1]
RECORDER = """
import json, os, sys, threading
from pathlib import Path

ROOT, OUT = os.environ["ROUTE_ROOT"], Path(os.environ["ROUTE_OUT"])
role = "other"
if "pipeline.execution.worker" in sys.orig_argv:
    role = "rank" + os.environ["RANK"]
elif "pipetrain" in sys.orig_argv and ("run" in sys.orig_argv or "resume" in sys.orig_argv):
    role = "launcher"
entered, stopping, steps = {}, {}, 0

def keep(name, found):
    (OUT / f"{role}-{name}.json").write_text(json.dumps([list(one) for one in found]))

def record(frame, event, argument):
    global steps
    code = frame.f_code
    if not code.co_filename.startswith((f"{ROOT}/pipeline/", f"{ROOT}/stages/")):
        return
    name = code.co_qualname
    if event == "call" and "<lambda>" not in name and not code.co_name.startswith("<"):
        if code.co_flags & 2:  # a function, not a class body
            key = code.co_filename.removeprefix(f"{ROOT}/"), name
            entered.setdefault(key)
            if stopping or name == "_raise":
                stopping.setdefault(key)
                keep("stop", stopping)
    elif event == "return" and name == "TorchEngine.step":
        steps += 1
        if steps == 1:
            keep("first-step", entered)

if role != "other":
    threading.setprofile(record)
    sys.setprofile(record)
"""


@click.command()
@click.option("--names", is_flag=True, help="Print each function too.")
def main(names: bool) -> None:
    """Run, stop and resume; print a Markdown table."""
    sys.path.insert(0, str(ROOT))
    from tests.support.tiny_project import tiny_project

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "sitecustomize.py").write_text(RECORDER)
        recipe = tiny_project(folder)
        run = folder / "run"
        first = _call(folder, "first", ["run", str(recipe), "--run-dir", str(run), *FSDP], run)
        newest = max(int(one.name[5:]) for one in (run / "checkpoints").glob("step-*"))
        again = _call(
            folder, "again", ["resume", str(run), *DDP, f"train.steps={newest + 1}"], None
        )
        rows = [
            ("rank start to the first optimizer step", first["rank0-first-step"]),
            ("the same, restored on other ranks: of pipeline/checkpoint",
             [one for one in again["rank0-first-step"] if "pipeline/checkpoint/" in one[0]]),
            ("SIGTERM in the launcher to exit 75", first["launcher-stop"]),
        ]  # fmt: skip
        table = [
            (way, str(len(found)), str(len({file for file, _ in found}))) for way, found in rows
        ]
        click.echo(markdown(("way", "functions", "files"), table))
        for way, found in rows if names else ():
            click.echo(f"\n{way}\n" + "\n".join(f"  {file} {name}" for file, name in found))


FSDP = ["wrap.use=wrap.fsdp", "train.steps=100000", "train.eval_every=50000", "train.generate=null"]
DDP = ["wrap.use=wrap.ddp", "launch.procs=3", "train.global_batch_size=6",
       "--accept", "global_batch_size"]  # fmt: skip


def _call(
    folder: Path, name: str, words: list[str], stopped: Path | None
) -> dict[str, list[list[str]]]:
    """Run a command, which is stopped by SIGTERM after a save of the run `stopped`, if given."""
    out = folder / name
    out.mkdir()
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "ROUTE_OUT": str(out), "ROUTE_ROOT": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipetrain", *words, "--quiet"], env=environment
    )
    while stopped is not None and process.poll() is None:
        time.sleep(0.2)
        if any(stopped.glob("checkpoints/step-*8")):
            process.send_signal(signal.SIGTERM)
            break
    code = process.wait()
    if code != (0 if stopped is None else 75):
        raise click.ClickException(f"exit code {code} of pipe {' '.join(words)}")
    return {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}


if __name__ == "__main__":
    main()
