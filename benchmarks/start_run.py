"""One start of `benchmarks/start.py`: the processes of a training, up to its first step."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import yaml
from bare.script import BATCH, CLIP, LENGTH, LR, SEED
from overhead_job import MODEL, STRATEGIES

from pipeline.contracts.metrics import records

SCRIPT = Path(__file__).with_name("bare") / "script.py"
LOOK_SECONDS = 0.005
LONGEST = 600.0
KEPT = 3000
"""Bytes of a start's output that are shown if it fails."""
TEXT = "It is a truth universally acknowledged, that one start takes as long as the next.\n" * 2000


@dataclass(frozen=True, kw_only=True)
class Start:
    """Seconds of a start until rank 0 had its first step's numbers."""

    seconds: float
    cpu: float
    """Processor time of all processes that were started."""


def prepare(folder: Path) -> None:
    """Write what both sides read: the model's config, tokens, a text and a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    (folder / "config.json").write_text(json.dumps(dict(MODEL)), "utf-8")
    (folder / "words.txt").write_text(TEXT, "utf-8")
    words = {word: number for number, word in enumerate(["<eos>", *sorted({*TEXT.split()})])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(folder / "tokenizer")
    tokens = np.random.default_rng(0).integers(0, MODEL["vocab_size"], 1 << 16)
    tokens.astype("<u4").tofile(folder / "tokens.bin")


def bare(folder: Path, strategy: str, procs: int, launcher: str) -> Start:
    """Start the script's ranks, by hand or by torchrun."""
    mark = folder / "stepped"
    mark.unlink(missing_ok=True)
    script = [str(SCRIPT), strategy, str(folder)]
    if launcher == "torchrun":
        agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={procs}"]
        return measure([([sys.executable, *agent, *script], {})], mark.exists, folder)
    port = str(free_port())
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(procs)}
    ranks = [
        ([sys.executable, *script], {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(procs)
    ]
    return measure(ranks, mark.exists, folder)


def ours(folder: Path, strategy: str, procs: int, run: Path) -> Start:
    """Start `pipe run` in a new folder `run`."""
    file = run.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe(folder, strategy, procs), sort_keys=False), "utf-8")
    command = [sys.executable, "-P", "-m", "pipetrain", "run", str(file), "--run-dir", str(run)]
    metrics = run / "metrics.jsonl"

    def stepped() -> bool:
        return metrics.exists() and any("loss" in record for record in records(metrics))

    return measure([([*command, "--quiet"], {})], stepped, folder)


def recipe(folder: Path, strategy: str, procs: int) -> dict[str, Any]:
    """Return the recipe of the script's training."""
    wrap = STRATEGIES[strategy]
    stages: dict[str, Any] = {
        "model": {
            "use": "model.hf",
            "config": str(folder / "config.json"),
            "tokenizer": str(folder / "tokenizer"),
        },
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {
            "use": "data.text",
            "files": str(folder / "words.txt"),
            "sequence_length": LENGTH,
            "cache": str(folder / "cache"),
        },
        "optimizer": {"use": "optimizer.adamw", "lr": LR, "max_grad_norm": CLIP},
        "wrap": {"use": wrap.wrap, **wrap.fields},
        "checkpoint": {"use": "checkpoint.sharded"},
        "train": {
            "use": "train.causal_lm", "steps": 1, "global_batch_size": BATCH * procs,
            "micro_batch_size": BATCH, "log_every": 1,
        },
    }  # fmt: skip
    launch = {"procs": procs, "device": "cpu", "threads": 1}
    return {"name": "start", "seed": SEED, "launch": launch, "stages": stages}


def measure(
    commands: Sequence[tuple[Sequence[str], dict[str, str]]],
    stepped: Callable[[], bool],
    folder: Path,
) -> Start:
    """Start commands with their environments, and end them when they have `stepped`. Raises
    click.ClickException, with the last that they have said, when one has failed before."""
    said = folder / "said.txt"
    with said.open("wb") as output:
        began = time.monotonic()
        started = [
            psutil.Popen(
                command,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command, own in commands
        ]
        try:
            while not stepped():
                late = time.monotonic() - began > LONGEST
                if late or any(process.poll() for process in started):
                    text = said.read_bytes()[-KEPT:].decode(errors="replace")
                    raise click.ClickException(f"a start has failed\n{text}")
                time.sleep(LOOK_SECONDS)
            seconds = time.monotonic() - began
            return Start(seconds=seconds, cpu=sum(used(process) for process in family(started)))
        finally:
            end(started)


def family(started: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes, with all that they have started."""
    found = []
    for process in started:
        with contextlib.suppress(psutil.Error):
            found += [process, *process.children(recursive=True)]
    return found


def used(process: psutil.Process) -> float:
    """Return the processor seconds of a process, with its children's that have ended."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.Error:
        return 0.0


def end(started: Sequence[psutil.Popen]) -> None:
    """Kill the processes with all that they have started, and wait for them."""
    everybody = family(started)
    for process in everybody:
        with contextlib.suppress(psutil.Error):
            process.kill()
    for process in started:
        process.wait()
    psutil.wait_procs(everybody, timeout=10)


def free_port() -> int:
    """Return a port of the loopback interface at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
