"""A paired comparison as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hlatctl.report.aligned import aligned
from hlatctl.report.items import Item
from hlatctl.report.paired import LEVEL, Flip, Paired, PairedRow
from hlatctl.report.paired_contracts import EQUAL
from hlatctl.units import counted, printable

_HEAD = (
    "task",
    "metric",
    "contracts",
    "items",
    "first",
    "second",
    "difference",
    "95 % interval",
    "gained",
    "lost",
    "p",
    "p (Holm)",
)
_ANSWER_CHARS = 60
#: Fields of contracts that are named, and the longest of their values that are shown.
_MOST_FIELDS, _VALUE_CHARS = 4, 24


def text(paired: Paired, first: str, second: str, flips: int) -> str:
    """Return a table, what can be said, and at most so many items of each row on which the two differ.

    Control characters in tasks and answers are shown by their codes.
    """
    lines = [
        f"first: {first}",
        f"second: {second}",
        "",
        *aligned([_HEAD, *(_cells(row) for row in paired.rows)], left=3),
        "",
    ]
    lines += [_verdict(paired.rows), *map(_contracts, (row for row in paired.rows if _is_doubtful(row)))]
    lines += [
        f"{row.name} is the mean over its {counted(row.tasks, 'task')}, whatever their numbers of items"
        for row in paired.rows
        if row.tasks
    ]
    unpaired = sum(row.unpaired for row in paired.rows)
    if unpaired:
        lines.append(f"{unpaired:,} items are left out: only one of the two has them")
    lines += [f"{name} is left out: {why}" for name, why in paired.left_out.items()]
    for row in paired.rows:
        for title, found in (("gained", row.gained[:flips]), ("lost", row.lost[:flips])):
            lines += ["", f"{row.name}: {title}", *(_flip(flip) for flip in found)] if found else []
    return printable("\n".join(lines) + "\n")


def as_json(paired: Paired, first: str, second: str) -> dict[str, Any]:
    """Return all rows with all items on which the two differ."""
    return {
        "first": first,
        "second": second,
        "level": LEVEL,
        "rows": [
            {**asdict(row), "gained": [_pair(flip) for flip in row.gained], "lost": [_pair(flip) for flip in row.lost]}
            for row in paired.rows
        ],
        "left_out": paired.left_out,
    }


def _cells(row: PairedRow) -> tuple[str, ...]:
    change = row.second - row.first
    return (
        row.name,
        row.metric,
        row.contracts.status,
        f"{row.items:,}",
        f"{row.first:.4f}",
        f"{row.second:.4f}",
        f"{change:+.4f}",
        f"{row.low:+.4f} to {row.high:+.4f}",
        str(len(row.gained)),
        str(len(row.lost)),
        f"{row.p:.3f}",
        f"{row.holm:.3f}{' *' if row.is_real else ''}",
    )


def _verdict(rows: list[PairedRow]) -> str:
    real = [row.name for row in rows if row.is_real]
    if not real:
        return f"no difference is more than chance (p < {LEVEL} after Holm's correction for {len(rows)} rows)"
    return f"* more than chance (p < {LEVEL} after Holm's correction for {len(rows)} rows): {', '.join(real)}"


def _is_doubtful(row: PairedRow) -> bool:
    """Whether something besides the model may have made the difference."""
    return row.contracts.status != EQUAL or row.reworded > 0


def _contracts(row: PairedRow) -> str:
    """Return what differs besides the models."""
    fields = row.contracts.differences
    named = [_field(name, *values) for name, values in list(fields.items())[:_MOST_FIELDS]]
    more = [f"{counted(len(fields) - _MOST_FIELDS, 'more field')}"] if len(fields) > _MOST_FIELDS else []
    prompts = [f"the prompts of {row.reworded:,} of {counted(row.items, 'item')}"] if row.reworded else []
    differs = "; ".join([*named, *more, *prompts])
    if differs:
        return f"{row.name}: not only the models differ, so the difference may come from this: {differs}"
    return f"{row.name}: a contract is not recorded, so it is unknown whether only the models differ"


def _field(name: str, first: str, second: str) -> str:
    return f"{name} ({first}, {second})" if max(len(first), len(second)) <= _VALUE_CHARS else name


def _flip(flip: Flip) -> str:
    target = f", right: {_cut(flip.first.target)}" if flip.first.target else ""
    return f"  {flip.first.task} {flip.first.name}{target}: {_short(flip.first)} -> {_short(flip.second)}"


def _short(item: Item) -> str:
    return f"{item.value:g}" + (f" ({_cut(item.answer)})" if item.answer else "")


def _cut(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= _ANSWER_CHARS else line[: _ANSWER_CHARS - 1] + "…"


def _pair(flip: Flip) -> dict[str, Any]:
    keys = {"task": flip.first.task, "name": flip.first.name, "target": flip.first.target}
    values = {"first": flip.first.value, "second": flip.second.value}
    return keys | values | {"first_answer": flip.first.answer, "second_answer": flip.second.answer}
