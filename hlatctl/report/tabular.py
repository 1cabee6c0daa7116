"""Tables: LaTeX for the package booktabs with escaped text, and plain lines with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

_ESCAPED = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≈": r"$\approx$",
    "≥": r"$\geq$",
    "·": r"$\cdot$",
    "–": "--",
    "†": r"\dag{}",
    "‡": r"\ddag{}",
    "§": r"\S{}",
    "¶": r"\P{}",
    "‖": r"$\parallel$",
    "°": r"$^\circ$",
    "\n": " ",
}
#: Longer cells need a column that breaks lines.
_LONG_CELL = 40


def escape_latex(plain: str) -> str:
    """Return plain text as LaTeX."""
    return "".join(_ESCAPED.get(character, character) for character in plain)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, label: str) -> str:
    r"""Return a table environment.

    Args:
        header: titles of the columns; all empty: no header.
        label: for ``\ref``.
    """
    widths = [max((len(row[index]) for row in rows), default=0) for index in range(len(header))]
    long = sum(width > _LONG_CELL for width in widths)
    share = f"p{{{0.75 / long if long else 1:.2f}\\linewidth}}"
    columns = "".join(share if width > _LONG_CELL else "l" for width in widths)
    head = f"{_line(header)}\\midrule\n" if any(header) else ""
    return (
        "% \\usepackage{booktabs}\n\\begin{table}\n\\centering\n"
        f"\\caption{{{escape_latex(caption)}}}\n\\label{{{label}}}\n"
        f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head}{''.join(map(_line, rows))}\\bottomrule\n"
        "\\end{tabular}\n\\end{table}\n"
    )


def _line(cells: Sequence[str]) -> str:
    return f"{' & '.join(map(escape_latex, cells))} \\\\\n"


def aligned(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return a line for each row; the first ``left`` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            f"{cell:<{width}}" if place < left else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return [line(cells) for cells in rows]
