"""Draw the pictures of docs/parallelism.md: `python docs/pictures.py` writes them beside itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
STYLE = """<style>
text { font: 13px sans-serif; fill: #1f2328 }
.paper { fill: #ffffff } .line { stroke: #59636e; fill: none } .small { font-size: 11px }
.in { fill: #10151b; text-anchor: middle }
.middle { text-anchor: middle } .title { font-weight: bold }
.empty { fill: #eaeef2 } .a { fill: #8ab8e6 } .b { fill: #f2a97e }
.c { fill: #8fcf9f } .d { fill: #d3a6dd }
.back { fill-opacity: 0.55 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .paper { fill: #0d1117 } .line { stroke: #9198a1 } .empty { fill: #2a313c }
.in { fill: #10151b } .back { fill-opacity: 0.8 }
}
</style>"""
COLOURS = "abcd"
"""Classes of the four ranks that a picture has."""


@dataclass(frozen=True)
class Canvas:
    """Size of a picture, and its parts in SVG."""

    width: int
    height: int
    parts: tuple[str, ...]

    def svg(self) -> str:
        """The file's contents."""
        box = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
        paper = f'<rect class="paper" width="{self.width}" height="{self.height}" rx="6"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
        return "\n".join([head, STYLE, paper, *self.parts, "</svg>"]) + "\n"


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle with the class of a rank, or `empty`."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="{kind}" {place} rx="2"/>'


def text(x: float, y: float, words: object, kind: str = "") -> str:
    """A line of text whose baseline begins, or with a class of the middle is centred, at (x, y)."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def frame(x: float, y: float, width: float, height: float, dash: str = "") -> str:
    """The outline of a group of ranks."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="line" {place} rx="5" stroke-dasharray="{dash}"/>'


def axes() -> Canvas:
    """Four layers and four samples, and what of them each of four ranks has."""
    panels: list[tuple[str, Sequence[str], Callable[[float, float], Iterator[str]]]] = [
        ("data", ("each rank has its own samples,", "and stores a part of every layer"),
         _data),
        ("tensor", ("all ranks compute every layer", "together, for the same samples"), _tensor),
        ("pipeline", ("each rank has some layers;", "samples pass through all ranks"), _pipeline),
        ("context", ("each rank has a part of every", "sample, and computes all layers"),
         _context),
        ("expert", ("as data, but experts stay where", "they are, and tokens go to them"),
         _expert),
    ]  # fmt: skip
    parts = [text(20, 110, "layers", "small"), text(20, 216, "samples", "small")]
    for number, (title, lines, draw) in enumerate(panels):
        x = 80 + 190 * number
        parts.append(text(x, 32, title, "title"))
        parts += draw(x, 50)
        parts += [text(x, 262 + 16 * row, line, "small") for row, line in enumerate(lines)]
    for number, colour in enumerate(COLOURS):
        x = 80 + 90 * number
        parts += [box(x, 302, 14, 14, colour), text(x + 20, 314, f"rank {number}", "small")]
    return Canvas(1040, 332, tuple(parts))


def _layers(x: float, y: float, kinds: Callable[[int], Sequence[str]]) -> Iterator[str]:
    """Four layers, each cut from left to right."""
    for layer in range(4):
        found = kinds(layer)
        width = 152 / len(found)
        for place, kind in enumerate(found):
            yield box(x + place * width, y + layer * 30, width - 2, 24, kind)


def _samples(x: float, y: float, kinds: Callable[[int], Sequence[str]]) -> Iterator[str]:
    """Four samples, each cut along its tokens."""
    for sample in range(4):
        found = kinds(sample)
        width = 152 / len(found)
        for place, kind in enumerate(found):
            yield box(x + place * width, y + 130 + sample * 15, width - 2, 11, kind)


def _data(x: float, y: float) -> Iterator[str]:
    yield from _layers(x, y, lambda layer: COLOURS)
    yield from _samples(x, y, lambda sample: COLOURS[sample])


def _tensor(x: float, y: float) -> Iterator[str]:
    yield from _layers(x, y, lambda layer: COLOURS)
    yield from _samples(x, y, lambda sample: ["empty"])
    yield text(x + 76, y + 162, "all, on every rank", "small middle")


def _pipeline(x: float, y: float) -> Iterator[str]:
    yield from _layers(x, y, lambda layer: COLOURS[layer])
    yield from _samples(x, y, lambda sample: ["empty"])
    yield text(x + 76, y + 162, "all, one after the other", "small middle")


def _context(x: float, y: float) -> Iterator[str]:
    yield from _layers(x, y, lambda layer: COLOURS)
    yield from _samples(x, y, lambda sample: COLOURS)


def _expert(x: float, y: float) -> Iterator[str]:
    for layer in range(4):
        for expert in range(8):
            yield box(x + 19 * expert, y + 30 * layer, 17, 24, COLOURS[expert // 2])
    yield from _samples(x, y, lambda sample: COLOURS[sample])


SIZES = {"pipeline": 2, "data": 2, "context": 2, "tensor": 2}
"""Axes of the picture of ranks, outermost first."""


def ranks() -> Canvas:
    """Sixteen ranks on two nodes, and the groups that they are in."""
    parts = []
    for rank in range(16):
        parts += _rank(rank)
    for stage in range(2):
        x = 110 + 440 * stage
        parts += [frame(x - 14, 60, 424, 172), text(x - 10, 52, f"node {stage}: part {stage} of "
                  "the model (pipeline)", "title")]  # fmt: skip
    labels = ((112, "data 0"), (192, "data 1"))
    parts += [text(8, y, words) for y, words in labels]
    parts += [text(8, y + 16, "other samples" if y > 150 else "", "small") for y, _ in labels]
    notes = (
        "Frames: tensor-parallel groups, neighbours that share every layer.",
        "Colours: slices of a sample (context). Ranks of one row on one node share samples.",
        "wrap.fsdp shards parameters over the four groups of a node: data and context together.",
    )
    parts += [text(110, 262 + 20 * row, note, "small") for row, note in enumerate(notes)]
    return Canvas(990, 322, tuple(parts))


def _rank(rank: int) -> Iterator[str]:
    place, rest = {}, rank
    for axis in reversed(SIZES):
        rest, place[axis] = divmod(rest, SIZES[axis])
    column = 2 * place["context"] + place["tensor"]
    x = 110 + 440 * place["pipeline"] + 98 * column + 4 * place["context"]
    y = 78 + 80 * place["data"]
    if place["tensor"] == 0:
        yield frame(x - 6, y - 6, 194, 66, "5 3")
    yield box(x, y, 84, 54, COLOURS[place["context"]])
    yield text(x + 42, y + 24, f"rank {rank}", "in")
    yield text(x + 42, y + 42, f"tensor {place['tensor']}", "in small")


def ulysses() -> Canvas:
    """The exchange around attention: tokens for heads."""
    parts = [
        text(60, 34, "before attention", "title"),
        text(60, 52, "each rank: some tokens, all heads", "small"),
        text(420, 34, "in attention", "title"),
        text(420, 52, "each rank: all tokens, some heads", "small"),
        text(780, 34, "behind attention", "title"),
        text(780, 52, "as before", "small"),
    ]
    for x, by_tokens in ((60, True), (420, False), (780, True)):
        for head in range(4):
            for slice_ in range(4):
                kind = COLOURS[slice_ if by_tokens else head]
                parts.append(box(x + 50 * slice_, 66 + 30 * head, 47, 27, kind))
        parts.append(text(x + 100, 204, "tokens", "small middle"))
        parts += [text(x - 44, 84 + 30 * head, f"head {head}", "small") for head in range(4)]
    for x in (290, 650):
        parts.append(text(x + 20, 112, "all-to-all", "small middle"))
        parts.append(f'<path class="line" d="M{x - 20},126 H{x + 60} m-8,-5 l8,5 l-8,5"/>')
    return Canvas(1000, 222, tuple(parts))


def schedules() -> Canvas:
    """Passes of eight micro-batches through four ranks under two schedules of torch."""
    parts: list[str] = []
    orders = {
        "GPipe: all forward passes, then all backward passes": gpipe,
        "1F1B: backward as soon as possible; rank 0 holds four micro-batches at most": one_f_one_b,
    }
    for number, (title, order) in enumerate(orders.items()):
        y = 50 + 160 * number
        parts.append(text(70, y - 14, title, "title"))
        for rank in range(4):
            parts.append(text(16, y + 19 + 28 * rank, f"rank {rank}"))
            parts.append(box(70, y + 28 * rank, 33 * STEP, 25, "empty"))
        for rank, number_, forward, begin in timed([order(rank, 4, 8) for rank in range(4)]):
            width = STEP if forward else 2 * STEP
            x, kind = 70 + begin * STEP, COLOURS[number_ % 4] + ("" if forward else " back")
            parts.append(box(x, y + 28 * rank, width - 1.5, 25, kind))
            parts.append(text(x + width / 2, y + 28 * rank + 17, number_, "in small"))
    words = "Wide and pale: backward, twice as long as forward. Gray: idle, 3/11 of the time."
    parts.append(text(70, 342, words, "small"))
    return Canvas(960, 360, tuple(parts))


STEP = 26
"""Width of a forward pass in the picture of schedules."""
Pass = tuple[int, bool]
"""Number of a micro-batch, and whether it is its forward pass."""


def gpipe(rank: int, ranks: int, count: int) -> list[Pass]:
    """Passes of a rank in order: all forward, then all backward."""
    return [(n, True) for n in range(count)] + [(n, False) for n in range(count)]


def one_f_one_b(rank: int, ranks: int, count: int) -> list[Pass]:
    """Passes of a rank in order: as many forward as there are ranks from here on, then one backward
    and one forward by turns."""
    ahead = min(ranks - rank, count)
    order = [(n, True) for n in range(ahead)]
    for done in range(count):
        order.append((done, False))
        if ahead + done < count:
            order.append((ahead + done, True))
    return order


def timed(orders: Sequence[Sequence[Pass]]) -> Iterator[tuple[int, int, bool, int]]:
    """Rank, micro-batch, whether forward, and begin of each pass, in units of a forward pass; each
    begins when its rank is free and what it needs has come."""
    last = len(orders) - 1
    ends: dict[tuple[int, int, bool], int] = {}
    waiting = [list(order) for order in orders]
    free = [0] * len(orders)
    while any(waiting):
        for rank, order in enumerate(waiting):
            while order:
                number, forward = order[0]
                before = rank - 1 if forward else rank + 1
                first = rank == 0 if forward else rank == last
                need = (rank, number, True) if first and not forward else (before, number, forward)
                ready = 0 if first and forward else ends.get(need)
                if ready is None:
                    break
                begin = max(free[rank], ready)
                free[rank] = ends[rank, number, forward] = begin + (1 if forward else 2)
                order.pop(0)
                yield rank, number, forward, begin


PICTURES = {
    "parallel-axes.svg": axes,
    "parallel-ranks.svg": ranks,
    "parallel-schedules.svg": schedules,
    "parallel-ulysses.svg": ulysses,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")
