"""Lines with names as an SVG file, by the standard library alone."""

import math
from html import escape
from pathlib import Path


WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 760, 420, 62, 20, 48, 120  # and of the margins around the axes
LINE = 14  # least distance of two names
COLORS = ("#333333", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")


def draw(lines: dict[str, list[tuple[float, float]]], x_title: str, y_title: str, path: Path) -> None:
    """Write {name: points (x, y), from left to right}."""
    xs, ys = zip(*(point for points in lines.values() for point in points))
    step = 10 ** math.floor(math.log10(max(ys) - min(ys)))
    low, high = math.floor(min(ys) / step) * step, math.ceil(max(ys) / step) * step
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / max(xs) * (right - LEFT), bottom - (y - low) / (high - low) * (bottom - TOP)

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11" fill="#333"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', '<rect width="100%" height="100%" fill="white"/>']
    for i in range(round((high - low) / step) + 1):
        _, y = at(0, low + i * step)
        parts.append(f'<path d="M{LEFT} {y:.0f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{low + i * step:g}</text>')
    for i in range(6):
        x, _ = at(max(xs) * i / 5, low)
        parts.append(f'<text x="{x:.0f}" y="{bottom + 16}" text-anchor="middle">{max(xs) * i / 5:.0f}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_title)}</text>')
    turned = f"translate(14 {(TOP + bottom) / 2:.0f}) rotate(-90)"
    parts.append(f'<text transform="{turned}" text-anchor="middle">{escape(y_title)}</text>')
    ends = sorted(lines, key=lambda name: lines[name][-1][1])
    lowest = math.inf  # place of the last name: they go upwards
    for name in ends:
        color = COLORS[list(lines).index(name) % len(COLORS)]
        places = [at(*point) for point in lines[name]]
        lowest = min(places[-1][1], lowest - LINE)
        drawn = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="M{drawn}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<text x="{right + 8}" y="{lowest + 4:.1f}" fill="{color}">{escape(name)}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
