"""Curves as SVG, for the documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, MARGIN = 760, 380, 56
COLOURS = ("#c9c9c9", "#1f6fb4", "#d1641b", "#2d8a4e", "#8a4ea8")


@dataclass(frozen=True)
class Curve:
    """Points (x, y) in order; a wide curve lies behind the others."""

    name: str
    points: Sequence[tuple[float, float]]
    wide: bool = False


def picture(curves: Sequence[Curve], x_name: str, y_name: str) -> str:
    """Return an SVG document of all curves with axes and a legend."""
    points = [point for curve in curves for point in curve.points]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        across = MARGIN + (x - left) / (right - left) * (WIDTH - 2 * MARGIN)
        down = HEIGHT - MARGIN - (y - low) / (high - low) * (HEIGHT - 2 * MARGIN)
        return f"{across:.1f},{down:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for number, curve in enumerate(curves):
        colour, thickness = COLOURS[number % len(COLOURS)], 7 if curve.wide else 2
        path = " ".join(place(x, y) for x, y in curve.points)
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="{thickness}" stroke-linejoin="round"/>'
        )
        row = MARGIN + 20 * number
        lines.append(
            f'<line x1="{WIDTH - 300}" y1="{row - 4}" x2="{WIDTH - 272}" y2="{row - 4}" '
            f'stroke="{colour}" stroke-width="{thickness}"/>'
            f'<text x="{WIDTH - 264}" y="{row}">{escape(curve.name)}</text>'
        )
    lines += _axis(left, right, low, high, x_name, y_name)
    return "\n".join([*lines, "</svg>", ""])


def _axis(
    left: float, right: float, low: float, high: float, x_name: str, y_name: str
) -> list[str]:
    bottom, end = HEIGHT - MARGIN, WIDTH - MARGIN
    return [
        f'<path d="M{MARGIN},{MARGIN} V{bottom} H{end}" fill="none" stroke="#444"/>',
        f'<text x="{MARGIN}" y="{bottom + 20}">{left:g}</text>',
        f'<text x="{end}" y="{bottom + 20}" text-anchor="end">{right:g}</text>',
        f'<text x="{WIDTH / 2}" y="{bottom + 36}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text x="{MARGIN - 6}" y="{bottom}" text-anchor="end">{low:.2f}</text>',
        f'<text x="{MARGIN - 6}" y="{MARGIN + 4}" text-anchor="end">{high:.2f}</text>',
        f'<text x="{MARGIN}" y="{MARGIN - 16}">{escape(y_name)}</text>',
    ]
