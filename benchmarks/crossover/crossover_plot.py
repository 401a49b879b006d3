"""Plot of the crossover map: a square for each view and K, M to the right, N upwards, coloured by the ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.crossover.crossover import SIZES, TITLES, CrossoverView, Map, Ratio, Shape
from loka.errors import InputError

CELL = 0.34  # inches of a shape's square
WIDEST = 1.0  # |log2| of the ratio at the ends of the colour scale: half to twice BF16's speed
COLOURS = "RdBu"  # red: FP8 is slower, blue: FP8 is faster
SALT = "loka"  # of ids in the SVG, so that the output is deterministic


def plot(found: Map, machine: str, path: Path, sizes: Sequence[int] = SIZES) -> None:
    """Write the plot. Raises InputError if matplotlib is missing or the file cannot be written."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError(f"matplotlib is not installed ({error}); pip install 'loka[report]'") from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    across, down = len(sizes), len(CrossoverView)
    side = CELL * len(sizes)
    with matplotlib.rc_context({"svg.hashsalt": SALT, "svg.fonttype": "none", "font.size": 7}):
        figure, axes = pyplot.subplots(
            down, across, figsize=(across * (side + 0.25) + 1.2, down * (side + 0.55) + 0.6), squeeze=False,
            sharex=True, sharey=True, layout="constrained",
        )  # fmt: skip
        for row, view in zip(axes, CrossoverView, strict=True):
            for axis, k in zip(row, sizes, strict=True):
                picture = axis.imshow(
                    values(found[view], k, sizes), origin="lower", cmap=COLOURS, vmin=-WIDEST, vmax=WIDEST
                )
                axis.set_xticks(range(across), [_short(m) for m in sizes], rotation=90)
                axis.set_yticks(range(across), [_short(n) for n in sizes])
            row[0].set_ylabel(f"{TITLES[view]}\nN")
        for axis, k in zip(axes[0], sizes, strict=True):
            axis.set_title(f"K = {k}")
        for axis in axes[-1]:
            axis.set_xlabel("M")
        bar = figure.colorbar(picture, ax=axes, shrink=0.5, ticks=[-1, -0.5, 0, 0.5, 1])
        bar.ax.set_yticklabels([f"{2**counter_id:.2f}" for counter_id in (-1, -0.5, 0, 0.5, 1)])
        bar.set_label("BF16's time over FP8's; above 1 FP8 is faster")
        figure.suptitle(f"FP8 against BF16, {machine}")
        try:
            figure.savefig(path, format="svg", metadata={"Date": None})
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}); choose another folder with -o") from error
        finally:
            pyplot.close(figure)


def values(view: dict[Shape, Ratio], k: int, sizes: Sequence[int]) -> list[list[float]]:
    """log2 of the ratios at one K: a row for each N, a column for each M; NaN for missing ones."""
    return [
        [math.log2(ratio.value) if (ratio := view.get((m, k, n))) is not None else math.nan for m in sizes]
        for n in sizes
    ]


def _short(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 else str(size)
