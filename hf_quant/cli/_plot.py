"""The demo's plot: distance to the 16-bit model versus size on disk."""

from pathlib import Path

import matplotlib.pyplot as plt

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


def _label_lines(points: list[Row], nearest: float) -> list[tuple[float, Row]]:
    """Return (height of its label, point): labels stay `nearest` times apart, so that they do not overlap."""
    placed: list[tuple[float, Row]] = []
    for point in sorted(points, key=lambda p: p.kl):
        placed.append((max(point.kl, placed[-1][0] * nearest) if placed else point.kl, point))
    return placed
