"""Superseded steps in MLflow.

When an attempt starts from step k, later steps of earlier attempts are superseded. MLflow's API can't remove values, so
they are removed from its database if that is an SQLite file. On a tracking server a repeated step keeps both values;
the later one has the later time and counts as the latest.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hlatctl.run.journal import Event

#: Metrics of steps by the step, and by tokens.
BY_STEP, BY_TOKENS = "train/", "by_tokens/train_"
_TIMEOUT_S = 30.0
_COLUMNS = "key, value, timestamp, step, is_nan, run_uuid"
_SUPERSEDED = "run_uuid = :run AND ((key GLOB :by_step AND step > :step) OR (key GLOB :by_tokens AND step > :tokens))"


@dataclass(frozen=True)
class Rewind:
    """The last copied step that still counts, and its tokens."""

    step: int
    tokens: int


def new_steps(
    events: Iterable[Event], *, last_step: int, attempt: int, tokens_per_step: int
) -> tuple[list[Event], Rewind | None, int]:
    """Find the steps to copy, and whether copied steps were superseded.

    Args:
        events: new ones, in order of time.
        last_step: newest step that has been copied.
        attempt: the newest attempt seen so far.
        tokens_per_step: for a ``train_started`` without tokens.

    Returns:
        The step events to copy; the step to go back to first, or None; the newest attempt now.
    """
    steps: dict[int, Event] = {}
    rewind = None
    for event in events:
        if event["kind"] == "train_started":
            step, attempt = int(event.get("resumed_from_step") or 0), max(attempt, event["attempt"])
            steps = {number: kept for number, kept in steps.items() if number <= step}
            if step < last_step:
                last_step = step
                rewind = Rewind(step, int(event.get("tokens") or step * tokens_per_step))
        # Late lines of a superseded attempt don't count.
        elif event["kind"] == "step" and event["attempt"] >= attempt and event["step"] > last_step:
            steps[event["step"]] = event
    return [steps[number] for number in sorted(steps)], rewind, attempt


def remove(database: Path, mlflow_run_id: str, to: Rewind) -> None:
    """Remove the metrics of superseded steps; idempotent.

    Raises:
        sqlite3.Error: the database can't be written.
    """
    values = {
        "run": mlflow_run_id,
        "step": to.step,
        "tokens": to.tokens,
        "by_step": f"{BY_STEP}*",
        "by_tokens": f"{BY_TOKENS}*",
    }
    with closing(sqlite3.connect(database, timeout=_TIMEOUT_S)) as connection, connection:
        for statement in _statements():
            connection.execute(statement, values)


def _statements() -> Iterator[str]:
    yield f"DELETE FROM metrics WHERE {_SUPERSEDED}"
    yield f"DELETE FROM latest_metrics WHERE {_SUPERSEDED}"
    # With MAX, SQLite takes the other columns from the row of the maximum.
    yield (
        f"INSERT OR IGNORE INTO latest_metrics ({_COLUMNS}) SELECT key, value, timestamp, MAX(step), is_nan, run_uuid "
        "FROM metrics WHERE run_uuid = :run AND (key GLOB :by_step OR key GLOB :by_tokens) GROUP BY key"
    )
