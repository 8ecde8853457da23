"""Save under every strategy and world size, and load under every other: all pairs.

    python benchmarks/any_to_any.py [--worlds 1,2,3,4] [--part 1/8] [--only WORD] [--json FILE]

The suite runs a covering subset of these pairs (tests/stages/checkpoint/test_any_to_any.py); all of
them take an hour. A pair is good when the digests of all logical tensors, the groups' settings,
counters, loss scale and progress are equal. Exits 1 when one is not.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import raw

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline.distributed.process_group import DistContext
from tests.support.processes import RankFailed, run_ranks
from tests.support.state import WRAPS, Setting, load_run, save_run
from tests.support.strategies import STRATEGIES
from tests.support.zero import has_libaio

NVME = "zero3 nvme"
BIG = {"vocab_size": 6001, "hidden_size": 96, "num_attention_heads": 4}
"""Sizes of a model in which a sub-group is large enough to be swapped."""


@click.command()
@click.option("--worlds", default="1,2,3,4", show_default=True)
@click.option("--part", default="1/1", show_default=True, help="The first of how many parts.")
@click.option("--only", default="", help="Savers whose names hold this.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every pair here.")
def main(worlds: str, part: str, only: str, json_file: Path | None) -> None:
    """Save under each strategy, load under all, and count the equal pairs."""
    places = [
        (wrap, int(world))
        for wrap in [*WRAPS, *([NVME] if has_libaio() else [])]
        for world in worlds.split(",")
        if fits(wrap, int(world))
    ]
    number, parts = (int(text) for text in part.split("/"))
    savers = [place for place in places if only in place[0]][number - 1 :: parts]
    found = [pair for saver in savers for pair in load_everywhere(saver, places)]
    wrong = [pair for pair in found if pair["problem"]]
    if json_file:
        equal = len(found) - len(wrong)
        raw.write(json_file, "any_to_any", found, pairs=len(found), equal=equal)
    click.echo(f"{len(found) - len(wrong)} of {len(found)} pairs are equal")
    for pair in wrong:
        click.echo(f"  {pair['from']} -> {pair['to']}: {pair['problem']}")
    if wrong:
        sys.exit(1)


def fits(wrap: str, world: int) -> bool:
    """Return whether the strategy can run on that number of processes."""
    return wrap == NVME or world % STRATEGIES[wrap].group == 0


def load_everywhere(saver: tuple[str, int], places: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Save once, then load under every strategy on every number of processes."""
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = BIG if saver[0] == NVME else {}
        nvme = f"{folder}/nvme"
        saved = run_ranks(save_run, saver[1], folder, _setting(saver[0], model, nvme))[0]
        began = time.monotonic()
        for world in sorted({world for _, world in places}):
            wraps = [wrap for wrap, its_world in places if its_world == world]
            settings = [_setting(wrap, model, nvme) for wrap in wraps]
            problems = _problems(saved, folder, world, settings)
            for wrap, problem in zip(wraps, problems, strict=True):
                to = _name((wrap, world))
                pairs.append({"from": _name(saver), "to": to, "problem": problem})
        bad = sum(bool(pair["problem"]) for pair in pairs)
        seconds = time.monotonic() - began
        click.echo(f"{_name(saver)}: {len(pairs) - bad}/{len(pairs)}  {seconds:.0f} s", err=True)
    return pairs


def _problems(saved: dict[str, str], folder: str, world: int, settings: list[Setting]) -> list[str]:
    """Return the problem under each setting, empty if all is equal. A failed load counts for all
    settings of its process group."""
    try:
        loaded = run_ranks(load_runs, world, folder, settings)[0]
    except RankFailed as error:
        return [str(error)] * len(settings)
    return [_difference(saved, one) for one in loaded]


def load_runs(dist: DistContext, folder: str, settings: list[Setting]) -> list[dict[str, Any]]:
    """Run `load_run` under one setting after another, in one process group."""
    return [load_run(dist, folder, setting) for setting in settings]


def _setting(wrap: str, model: dict[str, Any], nvme: str) -> Setting:
    return Setting(wrap=wrap, model=model, nvme=nvme)


def _name(place: tuple[str, int]) -> str:
    return f"{place[0]} on {place[1]}"


def _difference(saved: dict[str, str], loaded: dict[str, Any]) -> str:
    progress = loaded["progress"]
    if (progress["step"], progress["samples"], progress["tokens"]) != (3, 36, 100):
        return f"progress is {progress}"
    keys = sorted({*saved, *loaded["state"]})
    wrong = [key for key in keys if saved.get(key) != loaded["state"].get(key)]
    return f"differ: {', '.join(wrong[:5])}" if wrong else ""


if __name__ == "__main__":
    main()
