"""Measure how long texts and conversations take to become tokens, beside other ways.

    python recipes/fetch_smollm.py && python benchmarks/tokenising.py [--text 50] [--rounds 5]

Each way takes a generated file and the tokenizer and chat template of SmolLM2, in a fresh process
that has imported everything. The ways of a case take turns. Exits 1 when ways that should give the
same number of tokens do not.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import raw
import transformers
from tables import listed, markdown, ratio
from tokenisers import corpus
from tokenisers.ways import OURS, WAYS, load

MODEL = Path(__file__).parents[1] / "recipes" / "models" / "smollm2-135m-instruct"
MEASURED = ("seconds", "cpu", "call")
Runs = dict[int, dict[str, float]]
"""Round's number -> `seconds`, `cpu` (processor seconds of all processes and threads), `call`
(seconds of the call at the way's heart) and `tokens`."""


@click.command()
@click.option("--text", default=50.0, show_default=True, help="Megabytes of text.")
@click.option("--chat", default=25.0, show_default=True, help="Megabytes of conversations.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--only", default=",".join(WAYS), show_default=True, help="Cases.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Folder of another tokenizer.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything here.")
def main(
    text: float, chat: float, rounds: int, only: str, tokenizer: Path | None, json_file: Path | None
) -> None:
    """Measure every case, and print a table of each."""
    found: dict[str, dict[str, Runs]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        files = corpus.write(Path(scratch), text=int(text * 1e6), chat=int(chat * 1e6))
        loaded = load(tokenizer or smollm(Path(scratch)))
        for case in only.split(","):
            found[case] = measured(case, loaded, files[case], rounds)
            click.echo(f"\n{case}, {files[case].stat().st_size / 1e6:.1f} MB\n")
            click.echo(table(found[case]))
    if json_file:
        rows = [
            {"case": case, "way": way, "rounds": [runs[number] for number in sorted(runs)]}
            for case, ways in found.items()
            for way, runs in ways.items()
        ]
        raw.write(json_file, "tokenising", rows)
    wrong = [case for case in found if not agree(case, found[case])]
    if wrong:
        sys.exit(f"not the same number of tokens: {', '.join(wrong)}")


def smollm(scratch: Path) -> Path:
    """Return a folder with the tokenizer of the model that recipes/fetch_smollm.py fetches."""
    file = next(MODEL.glob("*.gguf"), None)
    if file is None:
        raise click.ClickException("no tokenizer: run recipes/fetch_smollm.py")
    folder = scratch / "tokenizer"
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    return folder


def measured(case: str, tokenizer: Any, file: Path, rounds: int) -> dict[str, Runs]:
    """Run the ways of a case in turns; another one begins each round."""
    names = list(WAYS[case])
    found: dict[str, Runs] = {name: {} for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            click.echo(f"{case}, round {number + 1}: {name} ...", err=True)
            found[name][number] = apart(case, name, tokenizer, file)
    return found


def apart(case: str, name: str, tokenizer: Any, file: Path) -> dict[str, float]:
    """Run one way in a process forked from this one, which uses no threads of the tokenizer."""
    fork = multiprocessing.get_context("fork")
    hearing, telling = fork.Pipe(duplex=False)
    child = fork.Process(target=_child, args=(telling, case, name, tokenizer, file))
    child.start()
    telling.close()
    try:
        told: dict[str, float] = hearing.recv()
    except EOFError:
        raise click.ClickException(f"{case}: {name} failed") from None
    finally:
        child.join()
    return told


def _child(telling: Connection, case: str, name: str, tokenizer: Any, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        cpu, began = _cpu(), time.perf_counter()
        tokens, call = WAYS[case][name](tokenizer, file, Path(folder))
        seconds = time.perf_counter() - began
        told = {"seconds": seconds, "cpu": _cpu() - cpu, "call": call, "tokens": float(tokens)}
    telling.send(told)


def _cpu() -> float:
    """Return the processor seconds of this process and of those that it has waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def table(runs: Mapping[str, Runs]) -> str:
    """Return a table with a row for each way: medians, every round, and ours relative to it."""
    head = ["", *(words for name in MEASURED for words in (name, f"ours / it, {name}"))]
    rows = []
    for way in runs:
        row = [way]
        for name in MEASURED:
            theirs = {number: run[name] for number, run in runs[way].items()}
            whole = "seconds" if name == "call" else name
            ours = {number: run[whole] for number, run in runs[OURS].items()}
            row += [listed(theirs), f"{ratio(ours, theirs):.2f}"]
        rows.append(row)
    return markdown(head, rows)


def agree(case: str, runs: Mapping[str, Runs]) -> bool:
    """Whether all ways gave as many tokens; for one file, whose lines others tokenise one by one,
    to a thousandth."""
    counts = [run["tokens"] for way in runs.values() for run in way.values()]
    return max(counts) - min(counts) <= (max(counts) / 1000 if case == "one file" else 0)


if __name__ == "__main__":
    main()
