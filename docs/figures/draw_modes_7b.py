"""Draws the modes at 16k tokens, from measured values (docs/measurements.md): python -m docs.figures.draw_modes_7b."""

from __future__ import annotations

from pathlib import Path

from training.comparison.figures import BLUE, GREY, LABEL_SIZE, canvas, png, style

# Peak GiB, ratio to `none` of the same run, where the label goes, whether no other point beats it in both.
POINTS = {
    "none": (27.0, 1.00, (-8, 10), "right", True),
    "bounce_linear": (7.5, 1.01, (4, -16), "left", False),
    "layer_stream": (8.7, 1.01, (4, 10), "left", False),
    "shard_offload": (5.3, 1.01, (4, 22), "left", True),
    "shard_offload, 32k tokens in 8 microbatches": (3.7, 1.05, (8, 4), "left", True),
}


def main() -> None:
    with style():
        figure, axes = canvas(4.2)
        front = sorted(point[:2] for point in POINTS.values() if point[4])
        axes.plot(*zip(*front, strict=True), color=BLUE, linewidth=1.5, zorder=2)
        for name, (memory, ratio, offset, side, best) in POINTS.items():
            colour = BLUE if best else GREY
            axes.plot(
                memory, ratio, "o", markersize=7, color=colour, markerfacecolor=colour if best else "none", zorder=3
            )
            axes.annotate(name, (memory, ratio), offset, textcoords="offset points", ha=side, fontsize=LABEL_SIZE)
        axes.set_xlim(0, 30)
        axes.set_ylim(0.98, 1.08)
        axes.set_xlabel("peak GPU memory (GiB)")
        axes.set_ylabel("step time, of none in the same run")
        axes.set_title("16k tokens with recompute: a fifth of the memory for 1% more time", loc="left")
        Path(__file__).with_name("modes_7b.png").write_bytes(png(figure))


if __name__ == "__main__":
    main()
