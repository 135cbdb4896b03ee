"""Saves the plots as PNG and SVG files where matplotlib is installed (`ddpdebug[plots]`). Torch-free."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpdebug.preflight.output.results import Check, Plot
from ddpdebug.preflight.output.svg import COLORS
from ddpdebug.sinks.text import clean

_STYLES = ("-", "--", ":", "-.")
_DPI = 150
_MAX_NAME = 60
_MAX_TEXT = 80


def save_figures(checks: Sequence[Check], directory: Path) -> list[Path]:
    """Write two files for each plot; return them, none without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError:
        return []
    written: list[Path] = []
    for number, check in enumerate(checks):
        for place, plot in enumerate(check.plots):
            figure = Figure(figsize=(7, 4), layout="constrained")
            FigureCanvasAgg(figure)  # its own canvas: the script's backend and open figures are left alone
            _draw(figure.add_subplot(), plot)
            directory.mkdir(parents=True, exist_ok=True)
            words = re.sub(r"[^A-Za-z0-9]+", "-", f"{check.group} {check.name}").strip("-").lower()[:_MAX_NAME]
            for kind in ("png", "svg"):
                file = directory / f"{number:02}-{words}-{place}.{kind}"
                with warnings.catch_warnings():  # a character that the font lacks is shown as a box
                    warnings.simplefilter("ignore", UserWarning)
                    figure.savefig(file, dpi=_DPI)
                written.append(file)
    return written


def _draw(axes: Any, plot: Plot) -> None:
    for i, series in enumerate(plot.series):
        pairs = zip(series.x, series.y, strict=False)
        points = [(x, y if math.isfinite(y) and (y > 0 or not plot.log_y) else math.nan) for x, y in pairs]
        points = [(x, y) for x, y in points if x > 0 or not plot.log_x]
        style = {"color": COLORS[i % len(COLORS)], "linestyle": _STYLES[i % len(_STYLES)], "label": _plain(series.name)}
        axes.plot([x for x, _ in points], [y for _, y in points], zorder=len(plot.series) - i, **style)
    if plot.log_x:
        axes.set_xscale("log")
    if plot.log_y:
        axes.set_yscale("log")
    for x, text in plot.marks:
        axes.axvline(x, color="0.4", linestyle=":", linewidth=1)
        axes.annotate(_plain(text), (x, 1), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=8)
    axes.set(title=_plain(plot.title), xlabel=_plain(plot.x_label), ylabel=_plain(plot.y_label))
    axes.grid(alpha=0.3)
    if len(plot.series) > 1:
        axes.legend()


def _plain(text: str) -> str:
    """Return a text that is not read as a formula."""
    return clean(text, _MAX_TEXT).replace("$", r"\$")
