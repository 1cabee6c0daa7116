"""Format a comparison as plain text, Markdown, LaTeX or a JSON value.

Lines and notes are the same in every format; a style defines how they are escaped and emphasised.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hlatctl.report import compare
from hlatctl.report import tabular as latex_text
from hlatctl.report.baselines import PERCENT, PLAIN
from hlatctl.report.compare import Cell, Column, Comparison, ScoreRow
from hlatctl.report.summary import GUESSING
from hlatctl.run.contract import digest
from hlatctl.units import count

_NOTHING = "–"
_TIE = "≈"
_ITEMS_UNKNOWN = "°"
_MARKS = {
    compare.OTHER_CONTRACT: "†",
    compare.NO_CONTRACT: "‡",
    compare.SIMULATED: "§",
    compare.PUBLISHED_OTHERWISE: "¶",
    compare.IMPORTED: "#",
    compare.IMPORTED_UNKNOWN: "‖",
}
_MEANINGS = {
    compare.OTHER_CONTRACT: "measured under another contract than the leftmost run of its row; not ranked",
    compare.NO_CONTRACT: "its contract is unknown; not ranked",
    compare.SIMULATED: "SIMULATED: nothing was trained; not ranked",
    compare.PUBLISHED_OTHERWISE: "published for other or unknown shots or items than the leftmost run's; not ranked",
    compare.IMPORTED: "imported; evaluator, task version, shots and items agree with the leftmost run",
    compare.IMPORTED_UNKNOWN: "imported, contract unknown; not ranked",
}
_ANSI = re.compile("\x1b\\[[0-9]*m")


@dataclass(frozen=True)
class _Style:
    """How a format writes text.

    Args:
        best: emphasises an escaped value; ``best_is`` names the emphasis.
        part: precedes the name of a part of a group.
        align: pads columns with spaces.
        for_reader: names runs by their display names, and their contracts and data by letters; otherwise by ids and
            hashes, as commands and files have them.
    """

    escape: Callable[[str], str]
    best: Callable[[str], str]
    best_is: str
    part: str
    align: bool = False
    for_reader: bool = True

    def name(self, column: Column) -> str:
        """Return the escaped name of a column."""
        return self.escape(column.title if self.for_reader else column.name)


def text(comparison: Comparison, *, bold: bool = False) -> str:
    """Return aligned plain text; ``bold`` adds ANSI codes for a terminal."""
    emphasis = "\x1b[1m{}\x1b[0m *" if bold else "{} *"
    style = _Style(str, lambda cell: emphasis.format(cell), "*", "  ", align=True, for_reader=False)
    header = [title.upper() for title in _titles(comparison)] + [column.name for column in comparison.columns]
    lines = [header, *_body(comparison, style)]
    rows = [line for line in lines if isinstance(line, list)]
    widths = [max(len(_ANSI.sub("", row[index])) for row in rows) for index in range(len(header))]
    below = "".join(f"{note}\n" for note in _notes(comparison, style))
    return "".join(f"\n{line}\n" if isinstance(line, str) else _aligned(line, widths) for line in lines) + "\n" + below


def markdown(comparison: Comparison) -> str:
    """Return a Markdown table and a list of notes."""
    style = _Style(_escape_markdown, lambda cell: f"**{cell}**", "bold", "&nbsp;&nbsp;")
    header = [*_titles(comparison), *map(style.name, comparison.columns)]
    titled = [
        [f"*{line}*", *[""] * (len(header) - 1)] if isinstance(line, str) else line for line in _body(comparison, style)
    ]
    table = "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *titled))
    return table + "\n" + "".join(f"- {note}\n" for note in _notes(comparison, style))


def latex(comparison: Comparison, caption: str = "", label: str = "tab:comparison") -> str:
    r"""Return a LaTeX table that needs the package booktabs.

    Args:
        caption: plain text; empty: one that names the runs.
        label: for ``\ref``.
    """
    style = _Style(latex_text.escape_latex, lambda cell: f"\\textbf{{{cell}}}", "bold", "\\quad ")
    header = [*_titles(comparison), *map(style.name, comparison.columns)]
    lines = [
        f"\\midrule\n\\multicolumn{{{len(header)}}}{{l}}{{\\textit{{{line}}}}} \\\\\n"
        if isinstance(line, str)
        else f"{' & '.join(line)} \\\\\n"
        for line in (header, *_body(comparison, style))
    ]
    notes = "".join(f"\n\\par {note}" for note in _notes(comparison, style))
    return (
        "% \\usepackage{booktabs}\n\\begin{table}\n\\centering\n"
        f"\\caption{{{style.escape(caption or _caption(comparison))}}}\n\\label{{{label}}}\n"
        f"\\begin{{tabular}}{{lrrl{'r' * (len(header) - 4)}}}\n\\toprule\n{''.join(lines)}\\bottomrule\n"
        f"\\end{{tabular}}\n{{\\footnotesize{notes}\n\\par}}\n\\end{{table}}\n"
    )


def _caption(comparison: Comparison) -> str:
    runs = [column.title for column in comparison.columns if column.kind == compare.RUN]
    more = " next to published ones" if len(runs) < len(comparison.columns) else ""
    named = " and ".join(filter(None, [", ".join(runs[:-1]), runs[-1]]))
    return f"Scores of {named}{more}, ± standard error."


def plain(comparison: Comparison) -> tuple[list[str], list[str | list[str]], list[str]]:
    """Return a header, lines (a section's title or a row of cells) and notes, as plain text."""
    style = _Style(str, lambda cell: f"{cell} *", "*", "– ")
    header = [*_titles(comparison), *map(style.name, comparison.columns)]
    return header, list(_body(comparison, style)), _notes(comparison, style)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as a JSON value, version 1 of its format."""
    return {"v": 1, **dataclasses.asdict(comparison)}


def _body(comparison: Comparison, style: _Style) -> Iterator[str | list[str]]:
    titles = _titles(comparison)
    empty = [""] * (len(titles) - 1)
    yield ["tokens", *empty, *map(_tokens, comparison.columns)]
    for name, text in (("contract", _contract), ("limit", _limit), ("data", _data)):
        named = _named(style)
        yield [name, *empty, *(style.escape(text(column, named)) for column in comparison.columns)]
    for title, rows in groupby(comparison.rows, key=lambda row: (row.section, row.unit)):
        yield style.escape(title[0] + (", percent" if title[1] == PERCENT else ""))
        before = ""
        for row in rows:
            label = style.part + style.escape(row.part) if row.part else style.escape(row.group)
            first = next((cell for cell in row.cells if cell), None)
            figures = (_figure(row, cell, first, style) for cell in row.cells)
            about = [*_measured(row, first), style.escape(row.metric), *[_guessing(row, style)] * (GUESSING in titles)]
            yield ["" if label == before else label, *about, *figures]
            before = label


def _named(style: _Style) -> Callable[[str], str]:
    """Return a function that shortens hashes: to letters by their first occurrence, or to eight digits."""
    letters: dict[str, str] = {}
    if style.for_reader:
        return lambda key: letters.setdefault(key, _letters(len(letters)))
    return lambda key: key[:8]


def _letters(number: int) -> str:
    """Return a name for a number from 0: A to Z, AA, AB and so on, as the columns of a spreadsheet."""
    before, last = divmod(number, 26)
    return (_letters(before - 1) if before else "") + chr(ord("A") + last)


def _titles(comparison: Comparison) -> list[str]:
    known = any(cell and cell.chance is not None for row in comparison.rows for cell in row.cells)
    return ["", "shots", "n", "metric", *[GUESSING] * known]


def _guessing(row: ScoreRow, style: _Style) -> str:
    chance = next((cell.chance for cell in row.cells if cell and cell.chance is not None), None)
    return "" if chance is None else style.escape(f"{chance:.{2 if row.unit == PERCENT else 3}f}")


def _measured(row: ScoreRow, cell: Cell | None) -> tuple[str, str]:
    if cell is None:
        return "", ""
    without = row.shots is None and (row.unit == PLAIN or cell.conditions.whole is not None)
    shots = "" if cell.conditions.shots is None and without else _known(cell.conditions.shots)
    return shots, _known(cell.n)


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def _otherwise(row: ScoreRow, cell: Cell, first: Cell | None) -> str:
    if first is None or cell is first:
        return ""
    (shots, items), own = _measured(row, first), _measured(row, cell)
    differences = [f"shots {own[0]}"] if own[0] != shots else []
    differences += [f"n {own[1]}"] if own[1] != items and cell.n is not None else []
    return f" ({', '.join(differences)})" if differences else ""


def _figure(row: ScoreRow, cell: Cell | None, first: Cell | None, style: _Style) -> str:
    if cell is None:
        return style.escape(_NOTHING.rjust(6) if style.align else _NOTHING)
    digits = 2 if row.unit == PERCENT else 3
    value = f"{cell.value:{6 if style.align else 0}.{digits}f}"
    shown = style.escape(value if cell.stderr is None else f"{value} ± {cell.stderr:.{digits}f}")
    if cell.standing == compare.BEST:
        shown = style.best(shown)
    tie = _TIE if cell.standing == compare.TIE else ""
    mark = tie + ("" if tie and cell.remark != compare.IMPORTED else _MARKS.get(cell.remark, ""))
    mark += _ITEMS_UNKNOWN if _items_unknown(cell) else ""
    return shown + (f" {style.escape(mark)}" if mark else "") + style.escape(_otherwise(row, cell, first))


def _items_unknown(cell: Cell) -> bool:
    return cell.n is None and cell.remark in (compare.PUBLISHED, compare.PUBLISHED_OTHERWISE)


def _tokens(column: Column) -> str:
    return "unknown" if column.imported else count(column.tokens)


def _contract(column: Column, named: Callable[[str], str]) -> str:
    if column.imported:
        return "imported"
    if column.kind == compare.BASELINE:
        return "published"
    if column.simulated:
        return "simulated"
    whole = column.contracts[0] if len(column.contracts) == 1 else digest(column.contracts)
    return named(whole) if column.contracts else "unknown"


def _limit(column: Column, _named: object) -> str:
    if column.kind == compare.BASELINE or not column.limits:
        return "unknown"
    if len(column.limits) > 1:
        return "several"
    limit = column.limits[0]
    return "none" if limit is None else f"{limit} items" if limit >= 1 else f"{limit:.3g} of the items"


def _data(column: Column, named: Callable[[str], str]) -> str:
    return "several" if len(column.data) > 1 else named(column.data[0]) if column.data else "unknown"


def _notes(comparison: Comparison, style: _Style) -> list[str]:
    all_cells = [cell for row in comparison.rows for cell in row.cells if cell]
    notes = []
    if any(cell.standing for cell in all_cells):
        notes.append(
            f"{style.best_is}: best of its row, beyond the error of every other; ≈: the best value and those "
            f"statistically equal to it: the difference is within {compare.Z_95:.2f} of its standard errors (one that "
            "is not given counts as 0; if both are not given, neither is best)"
        )
    if any(_items_unknown(cell) for cell in all_cells):
        notes.append(f"{_ITEMS_UNKNOWN}: the number of items was not published")
    if any(cell.remark == "" for cell in all_cells):
        notes.append("shots and n are those of the leftmost value of a row, and of every value that names no others")
    notes += [
        f"{mark}: {_MEANINGS[remark]}" for remark, mark in _MARKS.items() if any(c.remark == remark for c in all_cells)
    ]
    sources = dict.fromkeys(column.source for column in comparison.columns if column.source)
    notes += [f"published: {source}; measured by others, without one of our contracts" for source in sources]
    return [style.escape(note) for note in [*notes, *comparison.notes]]


def _aligned(texts: list[str], widths: list[int]) -> str:
    padded = (cell + " " * (width - len(_ANSI.sub("", cell))) for cell, width in zip(texts, widths, strict=True))
    return "  ".join(padded).rstrip() + "\n"


def _escape_markdown(plain: str) -> str:
    return re.sub(r"([\\|*_`<\[])", r"\\\1", plain.replace("\n", " "))
