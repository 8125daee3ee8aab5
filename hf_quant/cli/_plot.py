"""Plots: the demo's, of the distance to the 16-bit model versus size on disk, and the frontier of autoquant."""

from pathlib import Path

import matplotlib.pyplot as plt

from hf_quant.auto import Frontier
from hf_quant.cli._demo import Row


def draw(points: list[Row], title: str, path: Path) -> None:
    """Write a PNG; the first point is the 16-bit model that the others are compared with."""
    base, *others = points
    figure, axes = plt.subplots(figsize=(8, 5), dpi=150, layout="constrained")
    axes.set_yscale("log")
    axes.axvline(base.size / 1e6, color="0.6", linewidth=1, linestyle="--")
    style = {"textcoords": "offset points", "fontsize": 9}
    label = f"{base.name}: {base.bits:.0f} bits\nperplexity {base.perplexity:.3f}"
    place = {"xycoords": ("data", "axes fraction"), "xytext": (-6, 0), "ha": "right", "va": "top"}
    axes.annotate(label, (base.size / 1e6, 1), **place, **style, color="0.3")
    for index, point in enumerate(others):
        axes.scatter(point.size / 1e6, point.kl, s=70, color=f"C{index}", edgecolors="white", zorder=3)
    for line, point in _label_lines(others, nearest=1.22):
        label = f"{point.name}: {point.bits:.2f} bits, perplexity {point.perplexity / base.perplexity - 1:+.2%}"
        color = f"C{others.index(point)}"
        axes.annotate(label, (point.size / 1e6, line), xytext=(9, 0), va="center", **style, color=color)
    axes.set_xlim(0, 1.08 * base.size / 1e6)
    axes.set_xlabel("MB on disk (what stays in 16 bit included)")
    axes.set_ylabel("KL to the 16-bit model, nats per token (lower is better)")
    axes.set_title(title, loc="left")
    axes.grid(axis="y", color="0.92", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def draw_frontier(found: Frontier, title: str, path: Path) -> None:
    """Write an image of the predicted loss of each plan versus its time, or its size if no times were measured."""
    figure, axes = plt.subplots(figsize=(8, 5), dpi=150, layout="constrained")
    axes.set_yscale("log")
    shown = {label: point for label, point in found.points.items() if point.loss > 0}
    for label, point in shown.items():
        ratio = found.ratio(label)
        x = point.nbytes / 1e6 if ratio is None else ratio
        is_auto = label.startswith("auto")
        axes.scatter(x, point.loss, s=90 if label == found.chosen else 45, color="C0" if is_auto else "C1", zorder=3)
        if not is_auto or label == found.chosen:
            place = {"textcoords": "offset points", "xytext": (8, 0), "va": "center", "fontsize": 9}
            axes.annotate(label, (x, point.loss), **place)
    axes.set_xlabel("predicted time / time in 16 bit" if found.seconds else "MB in memory")
    axes.set_ylabel("predicted loss (lower is better)")
    axes.set_title(title, loc="left")
    axes.grid(color="0.92", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def _label_lines(points: list[Row], nearest: float) -> list[tuple[float, Row]]:
    """Return (height of its label, point): labels stay `nearest` times apart, so that they do not overlap."""
    placed: list[tuple[float, Row]] = []
    for point in sorted(points, key=lambda p: p.kl):
        placed.append((max(point.kl, placed[-1][0] * nearest) if placed else point.kl, point))
    return placed
