"""Which scores make which row of HLAT's tables, and the figures that others published; data, read from the YAML here.

A new set of published figures is a new YAML file; nothing here knows a run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hlatctl.run.errors import ConfigError
from hlatctl.run.suggest import suggest

#: Units of a row: its scores are fractions and shown times 100, or shown as they are.
PERCENT, PLAIN = "percent", "plain"
#: What is best in a row, besides a number that is ideal. Of an unknown metric nothing is.
HIGHEST, LOWEST, UNKNOWN = "highest", "lowest", "unknown"
_FOLDER = Path(__file__).parent
_ROWS = "rows"


@dataclass(frozen=True, kw_only=True)
class RowTitle:
    """What a row is about.

    Args:
        part: empty for a row of the group itself.
        shots: the paper's; None where there are none.
        best: ``highest``, ``lowest``, ``unknown``, or the ideal value in the row's unit.
    """

    id: str
    section: str
    group: str
    part: str
    shots: int | None
    metric: str
    unit: str
    best: str | float


@dataclass(frozen=True, kw_only=True)
class RowSpec(RowTitle):
    """One row; ``of`` are the scores (metric by task) that it is the mean of: alternatives, best first."""

    of: tuple[dict[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All rows, in order, and what to do with scores that belong to none.

    Args:
        others: title of the section for these.
        fractions: metrics of these that are fractions, with what is best of them (as in a row, in percent).
        left_out: patterns of score names that get no row.
    """

    rows: tuple[RowSpec, ...]
    others: str
    fractions: dict[str, str | float]
    left_out: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A published model.

    Args:
        tokens: that it was trained on.
        figures: value and standard error, in percent, by row.
        items: that a value was taken over, by row, as far as that is known.
    """

    name: str
    tokens: int
    figures: dict[str, tuple[float, float | None]]
    items: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """A set of published figures and where they are from."""

    name: str
    source: str
    notes: tuple[str, ...]
    models: tuple[Model, ...]


@functools.cache
def layout() -> Layout:
    """The rows of the tables."""
    data = _read(_ROWS)
    others = data["others"]
    return Layout(
        rows=tuple(
            RowSpec(
                id=row["id"],
                section=section["title"],
                group=group["group"],
                part=row.get("part", ""),
                shots=group.get("shots"),
                metric=row["metric"],
                unit=section["unit"],
                best=section["best"],
                of=tuple(row["of"]) if isinstance(row["of"], list) else (row["of"],),
            )
            for section in data["sections"]
            for group in section["groups"]
            for row in group["rows"]
        ),
        others=others["title"],
        fractions=others["fractions"],
        left_out=tuple(others["left_out"]),
    )


def names() -> list[str]:
    """The sets of published figures that there are."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml") if path.stem != _ROWS)


def load(name: str) -> Baselines:
    """A set of published figures.

    Raises:
        ConfigError: there is no such set.
    """
    if name not in names():
        raise ConfigError(f"--baselines={name}: no such set of published figures", hint=suggest(name, names()))
    data = _read(name)
    return Baselines(
        name=name,
        source=data["source"],
        notes=tuple(data["notes"]),
        models=tuple(
            Model(
                name=model,
                tokens=known["tokens"],
                figures=_figures(data["figures"], model),
                items={row: data["items"][row] for row in known.get("items", ())},
            )
            for model, known in data["models"].items()
        ),
    )


def _figures(by_row: dict[str, dict[str, list[float]]], model: str) -> dict[str, tuple[float, float | None]]:
    pairs = {row: figures[model] for row, figures in by_row.items() if model in figures}
    return {row: (pair[0], pair[1] if len(pair) > 1 else None) for row, pair in pairs.items()}


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return data
