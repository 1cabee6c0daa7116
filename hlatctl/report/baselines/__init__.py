"""Rows of HLAT's tables and published scores, read from the YAML files of this folder.

Each YAML file besides ``rows.yaml`` is one set of published scores. Nothing here reads a run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conf.load import SAFE_LOADER
from hlatctl.run.errors import ConfigError, suggest

#: Units of a row: fractions shown in percent, or values shown unchanged.
PERCENT, PLAIN = "percent", "plain"
#: Which value is best in a row, unless the row names an ideal number. Unknown metrics have no best value.
HIGHEST, LOWEST, UNKNOWN = "highest", "lowest", "unknown"
_FOLDER = Path(__file__).parent
_ROWS = "rows"


@dataclass(frozen=True, kw_only=True)
class RowTitle:
    """What a row shows.

    Args:
        part: empty for a row of the group itself.
        shots: solved examples in the paper; None if it has none.
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
    """One row: the mean over scores. ``of`` lists alternative sets of scores (metric by task), preferred first."""

    of: tuple[dict[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All rows in order, and how to show scores that belong to no row.

    Args:
        fractions: metrics of these scores that are fractions, with ``best`` as in a row (percent).
        left_out: patterns of score names that are not shown.
        names: names in papers, by the beginnings of the names of scores.
    """

    rows: tuple[RowSpec, ...]
    others: str
    fractions: dict[str, str | float]
    left_out: tuple[str, ...]
    names: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A published model.

    Args:
        figures: value and standard error in percent, by row.
        items: number of items of a value, by row, where published.
    """

    name: str
    tokens: int
    figures: dict[str, tuple[float, float | None]]
    items: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """A set of published scores and its source."""

    name: str
    source: str
    notes: tuple[str, ...]
    models: tuple[Model, ...]


@functools.cache
def layout() -> Layout:
    """Return the rows of the tables."""
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
        names=data["names"],
    )


def paper_name(score: str) -> str:
    """Return the name of a score as papers write it, such as ``MMLU, stem``; unknown ones are unchanged."""
    known = layout().names
    name = max((name for name in known if f"{score}_".startswith(f"{name}_")), key=len, default=None)
    if name is None:
        return score
    rest = score[len(name) + 1 :].replace("_", " ")
    return known[name] + (f", {rest}" if rest else "")


def names() -> list[str]:
    """Return the names of all sets of published scores."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml") if path.stem != _ROWS)


def load(name: str) -> Baselines:
    """Return a set of published scores; ConfigError if no set has this name."""
    if name not in names():
        raise ConfigError(f"--baselines={name}: no set of published scores has this name", hint=suggest(name, names()))
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
    data: dict[str, Any] = yaml.load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), SAFE_LOADER)
    return data
