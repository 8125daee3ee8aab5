"""A scatter plot of labelled points as an SVG file, by the standard library alone."""

import math
from html import escape
from pathlib import Path
from typing import NamedTuple


class Panel(NamedTuple):
    """One plot: {label: (x, y)}; the y axis is logarithmic."""

    title: str
    points: dict[str, tuple[float, float]]


WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 620, 560, 62, 34, 48, 150  # of a panel, and of the margins around its axes
LINE = 14  # least distance of two labels
GREY = 'stroke="#ddd"'


def draw(panels: list[Panel], x_title: str, y_title: str, path: Path) -> None:
    """Write the panels side by side, on the same axes."""
    points = [point for panel in panels for point in panel.points.values()]
    xs, ys = zip(*points)
    x_range = math.floor(min(xs)), math.ceil(max(xs))
    y_range = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    size = f'viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}" font-family="sans-serif" font-size="11" fill="#333"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', '<rect width="100%" height="100%" fill="white"/>']
    for index, panel in enumerate(panels):
        body = _panel(panel, x_range, y_range, x_title, y_title)
        parts.append(f'<g transform="translate({WIDTH * index} 0)">{body}</g>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _panel(panel: Panel, x_range: tuple[int, int], y_range: tuple[int, int], x_title: str, y_title: str) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_range[0]) / (x_range[1] - x_range[0])
        up = (math.log10(y) - y_range[0]) / (y_range[1] - y_range[0])
        return LEFT + across * (right - LEFT), bottom - up * (bottom - TOP)

    lines = [f'<text x="{LEFT}" y="20" font-size="14">{escape(panel.title)}</text>']
    for x in range(x_range[0], x_range[1] + 1):
        left, _ = at(x, 1)
        lines.append(f'<text x="{left:.0f}" y="{bottom + 16}" text-anchor="middle">{x}</text>')
    for decade in range(y_range[0], y_range[1] + 1):
        _, y = at(x_range[0], 10.0**decade)
        lines.append(f'<path d="M{LEFT} {y:.0f}H{right}" {GREY}/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{10.0**decade:g}</text>')
    lines.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_title)}</text>')
    middle = (TOP + bottom) / 2
    lines.append(
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>'
    )
    lowest = math.inf  # line of the last label: they go upwards
    for label, point in sorted(panel.points.items(), key=lambda item: item[1][1]):
        x, y = at(*point)
        lowest = min(y, lowest - LINE)
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#1f77b4"/>')
        lines.append(f'<path d="M{x + 5:.1f} {y:.1f}L{x + 14:.1f} {lowest:.1f}" stroke="#999"/>')
        lines.append(f'<text x="{x + 16:.1f}" y="{lowest + 4:.1f}">{escape(label)}</text>')
    return "\n".join(lines)
