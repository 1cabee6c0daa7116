"""Which runs `hlatctl runs` shows, in which order, and what differs between them; pure."""

from __future__ import annotations

import calendar
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlatctl.report.run_index import Row
from hlatctl.run.errors import ConfigError
from hlatctl.run.suggest import suggest

#: What rows can be sorted by, and the value of a row; rows without one come first.
SORT_KEYS = {
    "run": lambda row: row.run_id,
    "status": lambda row: row.status,
    "step": lambda row: row.step,
    "tokens": lambda row: row.tokens,
    "loss": lambda row: _number(row.loss),
    "validation": lambda row: _number(row.validation_loss),
    "cost": lambda row: _number(row.cost_usd),
    "hours": lambda row: row.node_hours,
    "created": lambda row: _number(row.created_unix_s),
    "changed": lambda row: _number(row.last_event_unix_s),
}
_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which rows to show; empty: all.

    Args:
        tags: value of each tag that a run must have; None: any value.
        statuses: one of which a run must have.
        experiment: of the run.
        since_unix_s: the run has an event after this time.
    """

    tags: Mapping[str, str | None]
    statuses: tuple[str, ...]
    experiment: str | None
    since_unix_s: float | None

    def takes(self, row: Row) -> bool:
        """Return whether a row is shown."""
        if self.statuses and row.status not in self.statuses:
            return False
        if self.experiment is not None and row.experiment != self.experiment:
            return False
        if self.since_unix_s is not None and (row.last_event_unix_s or 0.0) < self.since_unix_s:
            return False
        return all(key in row.tags and value in (None, row.tags[key]) for key, value in self.tags.items())


def tag_filter(words: Iterable[str]) -> dict[str, str | None]:
    """Return the tags that ``k`` and ``k=v`` ask for."""
    return {word.partition("=")[0]: word.partition("=")[2] if "=" in word else None for word in words}


def since(text: str, now_unix_s: float) -> float:
    """Return the Unix time that ``90m``, ``12h``, ``7d``, ``2w`` or ``2026-11-01`` (UTC) stands for.

    Raises:
        ConfigError: it has no such form.
    """
    if match := re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([mhdw])", text):
        return now_unix_s - float(match[1]) * _UNITS_S[match[2]]
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%d")))
    except ValueError:
        raise ConfigError(
            f"--since={text}: must be a date or an age", hint="--since 7d or --since 2026-11-01"
        ) from None


def ordered(rows: Sequence[Row], key: str, *, reverse: bool = False) -> list[Row]:
    """Return rows in ascending order of a column.

    Raises:
        ConfigError: there is no such column.
    """
    if key not in SORT_KEYS:
        raise ConfigError(f"--sort={key}: no such column", hint=suggest(key, list(SORT_KEYS)))
    return sorted(rows, key=SORT_KEYS[key], reverse=reverse)


def differing(rows: Sequence[Row]) -> list[str]:
    """Return each row's overrides that not all of the rows have, with keys as short as they stay distinct."""
    chosen = [dict(override.lstrip("+~").split("=", 1) for override in row.overrides) for row in rows]
    keys = dict.fromkeys(key for values in chosen for key in values)
    shown = [key for key in keys if len({values.get(key) for values in chosen}) > 1]
    short = _short(shown)
    return [" ".join(f"{short[key]}={values[key]}" for key in shown if key in values) for values in chosen]


def _short(keys: Iterable[str]) -> dict[str, str]:
    last: dict[str, list[str]] = {}
    for key in keys:
        last.setdefault(key.rpartition(".")[2], []).append(key)
    return {key: end if len(same) == 1 else key for end, same in last.items() for key in same}


def age(row: Row, now_unix_s: float) -> str:
    """Return the time since a run's newest event, in one unit: ``5 min``, ``3 h``, ``12 d``."""
    if row.last_event_unix_s is None:
        return "-"
    passed_s = max(0.0, now_unix_s - row.last_event_unix_s)
    for unit_s, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if passed_s >= unit_s:
            return f"{passed_s / unit_s:.0f} {unit}"
    return f"{passed_s:.0f} s"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else -math.inf
