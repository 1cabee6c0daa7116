"""Several runs side by side: rows, the keys in which their configurations differ, and their scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from conf.load import flatten
from conf.of_run import of_run
from hlatctl.report import baselines
from hlatctl.report.compare import RUN, Cell, Comparison, RunScores, compare, read_scores
from hlatctl.run.errors import ConfigError, HlatctlError
from hlatctl.run.paths import RunPaths

#: Maximum number of runs in one comparison.
MOST_RUNS = 50
#: Value of a key that a configuration doesn't have.
_MISSING = object()


def compared(runs: Sequence[RunPaths], published: str | None = None) -> dict[str, Any]:
    """Return what differs between runs, and their scores as `hlatctl compare` ranks them.

    Args:
        runs: runs in the order of the columns.
        published: a set of published scores to add; None: none.

    Raises:
        ConfigError: there are too many runs, or no such set.
    """
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"runs: {len(runs)} are given, at most {MOST_RUNS} are allowed", hint="choose fewer")
    notes: list[str] = []
    scores = [_scores(run, notes) for run in runs]
    known = baselines.load(published) if published else None
    table = compare([score for score in scores if score], known)
    return {
        "config": _differences(runs),
        "scores": _rows(table, scores),
        "baselines": [column.name for column in table.columns if column.kind != RUN],
        "published": baselines.names(),
        "milestones": [{"tokens": score.tokens, "step": score.step} if score else None for score in scores],
        "notes": [*notes, *table.notes],
    }


def _scores(run: RunPaths, notes: list[str]) -> RunScores | None:
    try:
        return read_scores(run, None, notes.append)
    except HlatctlError as error:
        notes.append(error.message)
        return None


def _differences(runs: Sequence[RunPaths]) -> list[dict[str, Any]]:
    configs: list[Mapping[str, Any]] = []
    for run in runs:
        configs.append({})
        with suppress(HlatctlError):  # a damaged run has no known value
            configs[-1] = flatten(of_run(run))
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        {"key": key, "values": [config.get(key) for config in configs]}
        for key in keys
        if any(config.get(key, _MISSING) != configs[0].get(key, _MISSING) for config in configs if config)
    ]


def _rows(table: Comparison, scores: Sequence[RunScores | None]) -> list[dict[str, Any]]:
    known = sum(score is not None for score in scores)
    found = []
    for row in table.rows:
        cells = iter(row.cells[:known])
        found.append(
            {
                "id": row.id,
                "section": row.section,
                "task": row.group,
                "part": row.part,
                "metric": row.metric,
                "unit": row.unit,
                "best": row.best,
                "headline": not row.part,
                "values": [_cell(next(cells)) if score else None for score in scores],
                "baselines": {
                    column.name: _cell(cell)
                    for column, cell in zip(table.columns[known:], row.cells[known:], strict=True)
                },
            }
        )
    return found


def _cell(cell: Cell | None) -> dict[str, Any] | None:
    return dataclasses.asdict(cell) if cell else None
