"""Write docs/results.md from its text, results/page.md, and the raw files in results/.

    python benchmarks/page.py [--check]

`{{name}}` in the text stands for a table of `page_tables.py` or a number of `numbers`. `--check`
writes nothing and exits 1 when the page is not what this program writes.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import raw
from gpu.page import mfu, ratio, step_seconds
from page_tables import FILES, TABLES, memory_ratios, percent, rows, speed_ratios

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
TEXT = raw.RESULTS / "page.md"
CLOSE_MEMORY, CLOSE_SPEED = 0.15, 0.2


def page() -> str:
    """Return the page. Raises KeyError for a name that neither tables nor numbers have."""
    known = {table.__name__: table for table in TABLES}
    values = numbers()

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        return known[name]() if name in known else values[name]

    return re.sub(r"\{\{(\w+)\}\}", filled, TEXT.read_text("utf-8"))


def numbers() -> Mapping[str, str]:
    """Return the numbers that the text names, as they are written."""
    return {**_dates(), **_gpu(), **_published(), **_totals(), **_step_time()}


def _dates() -> dict[str, str]:
    """The day of each measurement, with a dagger where the raw file was not kept."""
    found = {}
    for name, file in FILES.items():
        about = raw.read(file)
        mark = " †" if about["origin"].startswith("transcribed") else ""
        found[f"{name}_date"] = about["date"] + mark
    return found


def _gpu() -> dict[str, str]:
    second = {one["setting"]: one for one in rows("second")}
    found = {}
    for name, short in (("1b compiled", "full"), ("8b lora compiled", "lora"),
                        ("8b lora fp8", "fp8")):  # fmt: skip
        one = second[name]
        seconds = step_seconds(one)
        assert seconds is not None
        found[f"{short}_tokens"] = f"{one['tokens'] / seconds:,.0f}"
        found[f"{short}_mfu"] = percent(mfu(one))
    (nemo,) = rows("nemo")
    kinds = second["8b lora compiled"]["profile"]
    return found | {
        "full_of_bare": f"{ratio(second['1b compiled'], 'bare'):.2f}",
        "nemo_tokens": f"{nemo['tokens_per_second']:,.0f}",
        "products_share": percent(kinds["kinds_ms"]["products"] / kinds["ms"], 0),
    }


def _published() -> dict[str, str]:
    found = rows("published")
    memory, speed = memory_ratios(found), speed_ratios(found)
    limits = [one["memory"]["measured"] == "limit" for one in found
              if one.get("memory", {}).get("counted")]  # fmt: skip
    close = [
        value <= 1 if limit else abs(value - 1) <= CLOSE_MEMORY
        for value, limit in zip(memory, limits, strict=True)
    ]
    near = sum(abs(value - 1) <= CLOSE_SPEED for value in speed)
    return {
        "memory_close": f"{sum(close)} of {len(close)}",
        "speed_close": f"{near} of {len(speed)}",
        "speed_median": f"{statistics.median(speed):.2f}",
    }


def _totals() -> dict[str, str]:
    pairs, soak, journey = (raw.read(FILES[name]) for name in ("any_to_any", "soak", "journey"))
    watched = rows("watching")
    watching = [one["watched"]["mean"] / one["quiet"]["mean"] for one in watched]
    head = {one["way"].partition(" ")[0]: one["mib"] for one in rows("head")}
    return {
        "pairs": f"{pairs['equal']} of {pairs['pairs']}",
        "trials": f"{soak['good']} of {soak['trials']}",
        "journey_difference": f"{journey['largest_difference']:.1e}",
        "journey_steps": str(journey["steps"]),
        "watching": f"{statistics.median(watching):.3f}",
        "head_all": f"{head['all']:,.0f}",
        "head_ours": f"{head['ours']:,.0f}",
    }


def _step_time() -> dict[str, str]:
    ratios = [one["ratio"] for one in rows("step_time")]
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    return {"step_time": f"{low:.2f} to {high:.2f} times (median {middle:.2f})"}


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when the page differs.")
def main(check: bool) -> None:
    written = page()
    if not check:
        PAGE.write_text(written, "utf-8")
    elif PAGE.read_text("utf-8") != written:
        sys.exit(f"{PAGE.name} is not what this program writes: run python benchmarks/page.py")


if __name__ == "__main__":
    main()
