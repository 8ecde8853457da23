"""A benchmark as a picture: tokens a second by processes, a line for each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.bench.results import Row
from pipeline.optional import optional


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write one self-contained SVG. Raises StageError without matplotlib."""
    with optional("the plot needs matplotlib", hint="pip install 'pipetrain[report]'"):
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    with matplotlib.rc_context({"svg.hashsalt": "pipe"}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot(title=title, xlabel="processes", ylabel="tokens per second")
        ran = [row for row in rows if row.speed is not None]
        for strategy in dict.fromkeys(row.strategy for row in ran):
            mine = sorted((r for r in ran if r.strategy == strategy), key=lambda r: r.procs)
            speeds = [row.speed for row in mine if row.speed is not None]
            procs = [row.procs for row in mine]
            medians = [speed.median for speed in speeds]
            below = [speed.median - speed.low for speed in speeds]
            above = [speed.high - speed.median for speed in speeds]
            bars = axes.errorbar(
                procs, medians, yerr=[below, above], marker="o", capsize=3, label=strategy
            )
            if len(procs) > 1:
                ideal = [medians[0] * count / procs[0] for count in procs]
                axes.plot(procs, ideal, linestyle=":", color=bars[0].get_color())
        axes.plot([], [], linestyle=":", color="grey", label="ideal")
        axes.set_xticks(sorted({row.procs for row in ran}))
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None})
