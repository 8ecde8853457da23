"""Show what `pipe advise` chooses where experts agree on the answer, and how long it takes.

Every situation runs in a fresh process with no profile kept from before; then the recipe that was
written is checked and planned: `python benchmarks/advice.py [WORD ...]`, for all situations whose
name has one of the words. Needs no GPU.
"""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tables import markdown

PIPE = (sys.executable, "-m", "pipetrain")

SITUATIONS = {
    "7B, one 24 GB": "meta-llama/Llama-2-7b-hf --gpus 1 --gpu 'RTX 4090'",
    "7B LoRA, 16 GB": "meta-llama/Llama-2-7b-hf --lora --gpus 1 --memory 16",
    "70B LoRA, one H100": "meta-llama/Llama-3.1-70B --lora --gpus 1 --gpu H100",
    "8B, 4 x A100": "meta-llama/Llama-3.1-8B --gpus 4 --gpu A100",
    "13B, 8 x 40 GB": "meta-llama/Llama-2-13b-hf --gpus 8 --gpu 'A100 40GB'",
    "70B, 8 x 80 GB": "meta-llama/Llama-3.1-70B --gpus 8 --gpu H100",
    "70B, 64 x 80 GB": "meta-llama/Llama-3.1-70B --gpus 8 --nodes 8 --gpu H100 --interconnect 400g",
    "70B LoRA, 4 x 80 GB": "meta-llama/Llama-3.1-70B --lora --gpus 4 --gpu H100",
    "405B, 128 x 80 GB": "meta-llama/Llama-3.1-405B --gpus 8 --nodes 16 --gpu H100"
    " --interconnect 400g",
    "1.5B, 2 x 12 GB": "Qwen/Qwen2.5-1.5B --gpus 2 --memory 12",
    "13B, 32 x V100": "meta-llama/Llama-2-13b-hf --gpus 8 --nodes 4 --gpu V100"
    " --interconnect 10gbe",
    "8B, one H200": "meta-llama/Llama-3.1-8B --gpus 1 --gpu H200",
    "135M, CPUs": "HuggingFaceTB/SmolLM2-135M --host-memory 16",
}
"""Situation -> command line: the last table of issue 20's facts."""
NOTES = "warning", "low-rank", "tensor parallelism", "without offloading"
"""Beginnings of the advice's lines that are shown beside the choice."""
ABOUT_MACHINES = ("--gpus", "--nodes", "--gpu", "--memory", "--host-memory", "--interconnect")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Advice for one situation."""

    text: str
    seconds: float
    sound: bool
    """Whether the recipe passes `pipe check` and its plan fits."""

    def row(self) -> list[str]:
        """Return the table row: strategy, settings, memory, time, notes."""
        lines = self.text.splitlines()
        if not lines or not lines[0].startswith("chosen: "):
            return ["nothing", "", "", "; ".join(lines), f"{self.seconds:.0f}", "-"]
        name = lines[0].removeprefix("chosen: ").partition(" ")[0]
        own = itertools.takewhile(lambda line: line.startswith("  "), lines[2:])
        settings = " ".join(line.strip().partition(": ")[0] for line in own)
        notes = "; ".join(line for line in lines if line.startswith(NOTES))
        passed = "yes" if self.sound else "NO"
        return [name, settings, lines[1].strip(), notes, f"{self.seconds:.0f}", passed]


def answer(typed: str, folder: Path) -> Answer:
    """Run `pipe advise` without any cached profile."""
    environment = {**os.environ, "PIPE_PROFILES": str(folder / "profiles")}
    words, recipe = shlex.split(typed), folder / "recipe.yaml"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PIPE, *arguments], env=environment, capture_output=True, text=True, check=False
        )

    began = time.perf_counter()
    found = run("advise", *words, "--out", str(recipe))
    took = time.perf_counter() - began
    machines = [
        word
        for place, word in enumerate(words)
        if word in ABOUT_MACHINES or words[place - 1] in ABOUT_MACHINES
    ]
    sound = found.returncode == 0 and all(
        run(*command).returncode == 0
        for command in (("check", str(recipe)), ("plan", str(recipe), *machines))
    )
    text = found.stdout or found.stderr
    return Answer(text=text, seconds=took, sound=sound)


def main() -> None:
    """Print the table of all situations."""
    words = sys.argv[1:]
    rows = []
    for name, typed in SITUATIONS.items():
        if not words or any(word in name for word in words):
            with tempfile.TemporaryDirectory() as folder:
                found = answer(typed, Path(folder))
            print(f"\n{name}: pipe advise {typed}\n{found.text}", file=sys.stderr, flush=True)
            rows.append([name, *found.row()])
    head = ["situation", "strategy", "settings", "memory and time", "notes", "s", "checked"]
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
