"""Text for people: words, numbers, tables, names that are alike."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

DIGEST_SHOWN = 12
"""Characters of a digest in a message."""


def closest(word: str, options: Iterable[str]) -> str | None:
    """The option most like `word`, if any is like it at all."""
    names = list(options)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    # `length` is far from `sequence_length` by letters, but it is one of its words
    matches += [name for name in names if word in name.split("_") or name in word.split("_")]
    return matches[0] if matches else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A hint that names the closest option, else lists the options; empty without options."""
    names = list(options)
    found = closest(word, names)
    if found is not None:
        return f"did you mean `{found}`?"
    return f"known here: {', '.join(names)}" if names else ""


def near_path(path: str | Path, suffixes: Sequence[str] = ()) -> str:
    """A hint that names the file or folder next to a missing `path` whose name is most like its
    own, of those with one of the `suffixes` if any are given; empty without one."""
    missing = Path(path)
    if missing.exists():
        return ""
    try:
        found_here = missing.parent.iterdir()
        names = [one.name for one in found_here if not suffixes or one.suffix in suffixes]
    except OSError:
        return ""
    stems = {Path(name).stem: name for name in names}  # endings are alike, and say nothing
    alike = difflib.get_close_matches(missing.stem, stems, n=1, cutoff=0.6)
    found = next((stems[stem] for stem in alike), None)
    return f"did you mean {shown_path(missing.with_name(found))}?" if found else ""


def shown_path(path: str | Path) -> str:
    """A path as people write it: relative to the current folder if it lies below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here) if Path(path).is_relative_to(here) else path)


def human(size: float) -> str:
    """`1.5 GB`."""
    value, unit = float(size), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Return `0:05`, `12:34`, `3:05:09` or `2 d 3:05:09`; `?` for what is not a number."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02d}:{rest:02d}" if hours or days else f"{minutes}:{rest:02d}"
    return f"{days} d {clock}" if days else clock


def plural(count: int, noun: str) -> str:
    """`1 error`, `2 errors`, `2 processes`."""
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def counted(count: float, nouns: str) -> str:
    """`1 row`, `5,000 rows`: a number of what a plural names; only the number without a name."""
    number = f"{count:,.0f}"
    return f"{number} {nouns.removesuffix('s') if number == '1' else nouns}".rstrip()


def in_short(value: Any) -> str:
    """A value as text; of a hex digest the first characters."""
    text = str(value)
    digest = len(text) >= 32 and set(text) <= set("0123456789abcdef")
    return text[:DIGEST_SHOWN] if digest else text


def align(rows: Sequence[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """The rows as lines of columns, two blanks apart: the first `left` columns are aligned to the
    left, the others to the right. A row may have fewer cells than the others."""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    for row in rows:
        cells = zip(row, widths, strict=False)
        padded = (f"{cell:{'<' if i < left else '>'}{n}}" for i, (cell, n) in enumerate(cells))
        yield "  ".join(padded).rstrip()


def count(value: float) -> str:
    """Return `950`, `12,345`, `3.4 M` or `1.2 B`."""
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.1f} {unit}"
    return f"{value:,.0f}"


def gib(size: float) -> str:
    """Return a number of bytes as `61.2`, in GiB."""
    return f"{size / (1 << 30):.1f}"


def percent(share: float) -> str:
    """Return a share, 0 to 1, as `41.2 %`."""
    return f"{100 * share:.1f} %"


def number(value: float | None, form: str = ".4f") -> str:
    """Return a measurement as text; None stands for what JSON has no number for."""
    return "not a number" if value is None else f"{value:{form}}"


BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#"


def sparkline(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """Return a curve of at most `width` characters: means of as many equal parts of the values,
    from the lowest bar for the least to the highest for the greatest. Values that are not
    finite are left out."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if count < 1:
        return ""
    edges = [part * len(finite) // count for part in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    least, most = min(means), max(means)
    scale = (len(bars) - 1) / (most - least) if most > least else 0.0
    return "".join(bars[round((mean - least) * scale)] for mean in means)
