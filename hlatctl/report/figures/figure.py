"""A figure and its data, as SVG, PNG, PDF and CSV, and the style that all figures share.

This is the only importer of matplotlib, which is imported when a figure is drawn. The same data give the same bytes: no
file contains a time. Sizes fit one column of a paper. The colours are those of Okabe and Ito
(https://jfly.uni-koeln.de/color/), which colour-blind people can tell apart.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlatctl.run.errors import DependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: One column of a two-column paper, in inches.
WIDTH_IN, HEIGHT_IN = 3.35, 2.15
PNG_DOTS_PER_IN = 300
INK, HIGHLIGHT, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
#: For ranges behind a line of ``INK``, for what matters less, and for axes.
FAINT, QUIET, AXIS = "#b3d4e8", "#8a8f98", "#444444"
AMENDED = GREEN
#: Colours of lines after ``INK``, in order. With the markers, lines also differ in black and white.
OTHERS = (HIGHLIGHT, GREEN, PURPLE, ORANGE, SKY, QUIET)
DASHES: tuple[Any, ...] = ((0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (3, 3)), (0, (6, 1, 1, 1, 1, 1)))
SMALL_PT = 6.5

#: matplotlib's settings.
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "hlatctl",
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": SMALL_PT,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.borderaxespad": 0.3,
    "legend.columnspacing": 1.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": AXIS,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.5,
    "errorbar.capsize": 2,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.02,
    "figure.constrained_layout.w_pad": 0.02,
}


#: Metadata without the time and the version.
_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure.

    Args:
        name: file name without suffix.
        caption: what it shows, in one or two sentences.
        header, rows: the figure's data, for CSV; NaN and None are empty cells. Headers name units.
        plot: draws the figure.
    """

    name: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    plot: Callable[[Axes], None]
    width_in: float = WIDTH_IN
    height_in: float = HEIGHT_IN

    def svg(self) -> str:
        """Return the figure as SVG text, with a transparent background.

        Raises:
            DependencyError: matplotlib is not installed.
        """
        return self.picture("svg").decode()

    def picture(self, suffix: str) -> bytes:
        """Return the figure as a file's bytes.

        Args:
            suffix: ``svg``, ``png`` or ``pdf``.

        Raises:
            DependencyError: matplotlib is not installed.
        """
        return picture(self.plot, suffix, width_in=self.width_in, height_in=self.height_in)

    def csv(self) -> str:
        """Return the data in the figure as CSV text with a header."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([_cell(value) for value in row] for row in self.rows)
        return buffer.getvalue()


def picture(plot: Callable[[Axes], None], suffix: str, *, width_in: float, height_in: float) -> bytes:
    """Return a drawing as a file's bytes; SVG has a transparent background.

    Args:
        plot: draws the figure.
        suffix: ``svg``, ``png`` or ``pdf``.
        width_in, height_in: size in inches.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    buffer, transparent = io.BytesIO(), suffix == "svg"
    with _styled():
        from matplotlib.figure import Figure as Canvas

        canvas = Canvas(figsize=(width_in, height_in))
        plot(canvas.add_subplot())
        metadata = _METADATA[suffix]
        canvas.savefig(buffer, format=suffix, dpi=PNG_DOTS_PER_IN, transparent=transparent, metadata=metadata)
    return buffer.getvalue()


@contextmanager
def _styled() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError:
        raise DependencyError("the report's figures need matplotlib", hint="pip install 'hlatctl[head]'") from None
    settings: Any = SETTINGS
    with matplotlib.rc_context(settings):
        yield


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.8g}"
    return "" if value is None else value
