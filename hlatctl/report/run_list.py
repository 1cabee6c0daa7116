"""The rows of `hlatctl runs` and `hlatctl watch`: which runs they show, in which order, and what differs between them.

``<runs_dir>/.cache/runs-<uid>.json`` is an index of the runs that have not changed since they were last read: what each
journal said, with the sizes and times of its files. The journal decides: an entry whose files have changed is read
again, and an index that is damaged, of another version or of another user is discarded. It belongs to one user, because
runs can be more private than their folder. It never records whether a run has a driver. 5,000 unchanged runs cost a few
calls of ``stat`` each.

`hlatctl watch` shows runs that are running or ended within a day, and follows only these. It looks at all runs of the
folder every ``SCAN_S``.
"""

from __future__ import annotations

import calendar
import dataclasses
import math
import os
import re
import string
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hlatctl.plan.pace import seconds_per_step, training_left_s
from hlatctl.report.run_view import RunView, view_run
from hlatctl.run import files, reader
from hlatctl.run.errors import ConfigError, RunNotFoundError, suggest
from hlatctl.run.evaluations import headlines
from hlatctl.run.files import DAMAGED, from_plain
from hlatctl.run.fold import code, source_crc
from hlatctl.run.lease import driver
from hlatctl.run.paths import RunPaths, cache_dir
from hlatctl.run.reader import INTERRUPTED, status_of
from hlatctl.run.runs import find_run, list_runs
from hlatctl.run.state import RunState
from hlatctl.units import count, number, queued

#: Options whose value can look like an override.
_WITH_VALUE = ("--tag", "--note", "--name", "--run-id", "--sweep-id", "--config-dir")
#: Points of a sparkline, and its heights.
_SPARK_POINTS, _HEIGHTS = 40, string.digits + string.ascii_lowercase
#: Size and time of each file that an entry depends on, by name.
Files = dict[str, list[int]]


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """What `hlatctl runs` shows of a run. The fields are the keys of ``--json``.

    Args:
        note: the newest note; empty if there is none.
        overrides: overrides of the command that created the run.
        scores: headline scores of the newest evaluated milestone.
        node_hours: node-hours used (``numbers.node_hours``).
        cost_usd: None if the price of a node is unknown.
        parent: the run that it was forked from; empty if there is none.
    """

    run_id: str
    status: str
    simulated: bool
    step: int
    total_steps: int | None
    tokens: int
    loss: float | str | None
    validation_loss: float | None
    created_unix_s: float | None
    last_event_unix_s: float | None
    experiment: str
    sweep: str
    name: str
    tags: dict[str, str]
    note: str
    overrides: list[str]
    scores: dict[str, float]
    node_hours: float
    cost_usd: float | None
    parent: str
    path: str
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run as its journal describes it, with the status that it has without a driver.

    Args:
        driven: status while a process drives the run; None: it has ended, so a driver doesn't matter.
        spark: its :func:`sparkline`.
    """

    files: Files
    row: dict[str, Any]
    driven: str | None
    spark: str


def rows(runs_dir: Path) -> list[RunRow]:
    """Return a row for each run of a folder, oldest first."""
    known = read_index(runs_dir)
    found, entries = [], {}
    for run in list_runs(runs_dir):
        now, entry = files_of(run), known.get(run.run_id)
        if entry is None or entry.files != now:
            view = view_run(run)
            row, entry = row_of(view), entry_of(view, now)
        else:
            row = row_from(run, entry)
        found.append(row)
        if entry and now is not None:
            entries[run.run_id] = entry
    if entries != known:
        write_index(runs_dir, entries)
    return found


def called(runs_dir: Path, name: str) -> RunPaths | None:
    """Return the run whose label is this name; None if there is none.

    Raises:
        RunNotFoundError: several runs have the name.
    """
    ids = [row.run_id for row in rows(runs_dir) if name and row.name == name]
    if len(ids) > 1:
        raise RunNotFoundError(f"{name}: is the name of {len(ids)} runs", hint=f"one of: {', '.join(ids[-5:])}")
    return find_run(runs_dir, ids[0]) if ids else None


def row_from(run: RunPaths, entry: Entry) -> RunRow:
    """Return the row of a run whose files are those of an entry."""
    status = entry.driven if entry.driven and driver(run) else str(entry.row["status"])
    return RunRow(**{**entry.row, "path": str(run.root), "status": status})


def row_of(view: RunView) -> RunRow:
    """Return the row of a run's state."""
    from hlatctl.report.numbers import cost_usd, node_hours  # late: `hlatctl --help` doesn't need YAML

    state, last = view.state, view.state.last_step
    return RunRow(
        run_id=view.run.run_id,
        status=view.status,
        simulated=state.simulated,
        step=state.step,
        total_steps=view.total_steps,
        tokens=state.tokens,
        loss=last.get("loss") if last else None,
        validation_loss=state.validation_loss,
        created_unix_s=state.created_unix_s or None,
        last_event_unix_s=state.last_event_unix_s or None,
        experiment=view.config.experiment_name if view.config else "",
        sweep=state.sweep,
        name=state.labels.name,
        tags=state.labels.tags,
        note=state.labels.notes[-1].text if state.labels.notes else "",
        overrides=overrides_of(state.argv),
        scores=_scores(state),
        node_hours=node_hours(state, view.config) if view.config else 0.0,
        cost_usd=cost_usd(state, view.config) if view.config else None,
        parent=(view.config.fork.run or "") if view.config else "",
        path=str(view.run.root),
        problem=view.problem or None,
    )


def sparkline(losses: Sequence[float]) -> str:
    """Return a curve for a picture of a few pixels: a digit of base 36 for each height, a space where there is none.

    The top is the largest mean after the first tenth, so that the first steps don't flatten the rest, and at least 5 %
    above the bottom, so that noise looks small.
    """
    points = min(len(losses), _SPARK_POINTS)
    edges = [index * len(losses) // points for index in range(points)] if points > 1 else []
    groups = [losses[start:stop] for start, stop in zip(edges, [*edges[1:], len(losses)], strict=False)]
    means = [math.fsum(finite) / len(finite) if (finite := list(filter(math.isfinite, g))) else None for g in groups]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, high = min(known), max([mean for mean in means[points // 10 :] if mean is not None] or known)
    scale = (len(_HEIGHTS) - 1) / (max(high - low, 0.05 * abs(low)) or 1.0)
    return "".join(
        " " if mean is None else _HEIGHTS[min(len(_HEIGHTS) - 1, round((mean - low) * scale))] for mean in means
    )


def overrides_of(argv: list[str]) -> list[str]:
    """Return the overrides of a command line, without the values of its options."""
    words = zip(argv[1:], argv, strict=False)
    return [word for word, before in words if "=" in word and not word.startswith("-") and before not in _WITH_VALUE]


def _scores(state: RunState) -> dict[str, float]:
    newest_first = (state.milestones[tokens].scores for tokens in sorted(state.milestones, reverse=True))
    scores = next(filter(None, newest_first), {})
    return {name: number(scores[name], "value") for name in headlines(scores)}


def entry_of(view: RunView, now: Files | None) -> Entry | None:
    """Return the entry of a run; None if it is damaged, so that it is read again each time."""
    if view.problem or now is None:
        return None
    driven, undriven = status_of(view.state, is_driven=True), status_of(view.state, is_driven=False)
    row = {**dataclasses.asdict(row_of(view)), "status": undriven}
    spark = sparkline(view.state.steps.losses())
    return Entry(files=now, row=row, driven=driven if driven != undriven else None, spark=spark)


def files_of(run: RunPaths) -> Files | None:
    """Return the files that a run's row depends on; None if they can't be listed."""
    try:
        found = {"config": _version(os.stat(run.config))}
        with os.scandir(run.journal) as entries:
            found |= {entry.name: _version(entry.stat()) for entry in entries if entry.name.endswith(".jsonl")}
    except OSError:
        return None
    return found


def _version(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def read_index(runs_dir: Path) -> dict[str, Entry]:
    """Return the entries of a folder's index; empty if it is missing, damaged, or not this user's."""
    path = _index_file(runs_dir)
    try:
        if path.stat().st_uid != os.geteuid():
            return {}
        index = files.read_sealed_json(path)
        if index["code"] != _code():
            return {}
        entries = {str(name): from_plain(Entry, entry) for name, entry in index["runs"].items()}
        for entry in entries.values():
            from_plain(RunRow, entry.row)
    except (OSError, *DAMAGED):
        return {}
    return entries


def write_index(runs_dir: Path, entries: dict[str, Entry]) -> None:
    """Write an index for this user only. An unwritable folder or a full disk is not an error."""
    path = _index_file(runs_dir)
    index: dict[str, Any] = {"code": _code(), "runs": {name: vars(entry) for name, entry in entries.items()}}
    with suppress(OSError):
        if path.parent.is_dir():
            files.write_sealed_json(path, index, private=True)


def _index_file(runs_dir: Path) -> Path:
    return cache_dir(runs_dir) / f"runs-{os.geteuid()}.json"


@cache
def _code() -> int:
    of_reader = source_crc(Path(reader.__file__).parent, ("reader",), code())
    return source_crc(Path(__file__).parent, ("run_list", "run_view", "numbers"), of_reader)


#: Sort keys and a row's value of each; rows without a value come first.
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
        tags: required value of each tag; None: any value.
        statuses: accepted statuses.
        since_unix_s: require an event after this time.
    """

    tags: Mapping[str, str | None]
    statuses: tuple[str, ...]
    experiment: str | None
    since_unix_s: float | None

    def takes(self, row: RunRow) -> bool:
        """Return whether a row is shown."""
        if self.statuses and row.status not in self.statuses:
            return False
        if self.experiment is not None and row.experiment != self.experiment:
            return False
        if self.since_unix_s is not None and (row.last_event_unix_s or 0.0) < self.since_unix_s:
            return False
        return all(key in row.tags and value in (None, row.tags[key]) for key, value in self.tags.items())


def tag_filter(words: Iterable[str]) -> dict[str, str | None]:
    """Return the tags that ``k`` and ``k=v`` select."""
    return {word.partition("=")[0]: word.partition("=")[2] if "=" in word else None for word in words}


def since(text: str, now_unix_s: float) -> float:
    """Return the Unix time that ``90m``, ``12h``, ``7d``, ``2w`` or ``2026-11-01`` (UTC) stands for.

    Raises:
        ConfigError: the text has another format.
    """
    if match := re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([mhdw])", text):
        return now_unix_s - float(match[1]) * _UNITS_S[match[2]]
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%d")))
    except ValueError:
        raise ConfigError(
            f"--since={text}: must be a date or an age", hint="--since 7d or --since 2026-11-01"
        ) from None


def ordered(rows: Sequence[RunRow], key: str, *, reverse: bool = False) -> list[RunRow]:
    """Return rows in ascending order of a column.

    Raises:
        ConfigError: there is no such column.
    """
    if key not in SORT_KEYS:
        raise ConfigError(f"--sort={key}: no such column", hint=suggest(key, list(SORT_KEYS)))
    return sorted(rows, key=SORT_KEYS[key], reverse=reverse)


def differing(rows: Sequence[RunRow]) -> list[str]:
    """Return each row's overrides that some other row doesn't have, with the shortest keys that name one key."""
    chosen = [dict(override.lstrip("+~").split("=", 1) for override in row.overrides) for row in rows]
    keys = dict.fromkeys(key for values in chosen for key in values)
    shown = [key for key in keys if len({values.get(key) for values in chosen}) > 1]
    short = _short(shown)
    return [" ".join(f"{short[key]}={values[key]}" for key in shown if key in values) for values in chosen]


def _short(keys: Iterable[str]) -> dict[str, str]:
    ends, shown = _ends_of_keys(), list(keys)
    same = Counter(key.rpartition(".")[2] for key in shown)
    return {key: end if same[end := key.rpartition(".")[2]] == 1 and ends[end] < 2 else key for key in shown}


@cache
def _ends_of_keys() -> Counter[str]:
    """Count the keys of a configuration that end with the same word, such as ``enabled``."""
    from conf.constraints import field_types
    from conf.schema import Config

    def ends(schema: type) -> Iterator[str]:
        for field in dataclasses.fields(schema):
            expected = field_types(schema)[field.name]
            if isinstance(expected, type) and dataclasses.is_dataclass(expected):
                yield from ends(expected)
            else:
                yield field.name

    return Counter(ends(Config))


def age(row: RunRow, now_unix_s: float) -> str:
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


#: Interval between two scans of all runs of the folder; 5,000 runs take a second.
SCAN_S = 30.0
_DAY_S = 86_400.0
#: Maximum number of ended runs; the newest are shown.
_MOST_ENDED = 100
#: Statuses of runs that a process drives.
ALIVE = ("running", "stopping")
#: Statuses of runs that can't continue by themselves.
NEEDS_PERSON = ("failed", INTERRUPTED, "damaged")


@dataclass(frozen=True, kw_only=True)
class LiveRow:
    """What `hlatctl watch` shows of a run.

    Args:
        tokens_per_s, left_s: speed and remaining time, from recent steps; None if unknown, or the run has ended.
        needs_person: the run can't continue unattended.
        what: current activity, why it ended, or its newest warning.
    """

    run_id: str
    status: str
    simulated: bool
    step: int
    total_steps: int | None
    loss: float | None
    tokens_per_s: float | None
    left_s: float | None
    needs_person: bool
    what: str


class LiveRuns:
    """Follows the runs of a folder that matter now."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._followed = folder, dict[str, RunView]()
        self._next_scan_s = 0.0

    def refresh(self) -> list[LiveRow]:
        """Return a row for each run: those that need a person, then the running ones, then the ended ones."""
        if time.monotonic() >= self._next_scan_s:
            self._scan()
            self._next_scan_s = time.monotonic() + SCAN_S
        found = [live_row(view.refresh()) for view in self._followed.values()]
        return sorted(found, key=lambda row: (not row.needs_person, row.status not in ALIVE))

    def _scan(self) -> None:
        now_unix_s = time.time()
        before, self._followed, ended = self._followed, {}, 0
        for row in reversed(rows(self._folder)):
            run, alive = RunPaths(Path(row.path)), row.status in ALIVE
            if alive or (ended < _MOST_ENDED and now_unix_s - _changed_unix_s(run) < _DAY_S):
                ended += not alive
                self._followed[row.run_id] = before.get(row.run_id) or RunView(run)


def live_row(view: RunView) -> LiveRow:
    """Return the row of a run's state."""
    state, last = view.state, view.state.last_step
    running, waiting = view.status in ALIVE and not view.ended, state.queued.values()
    pace_s = seconds_per_step(state, view.config) if running else None
    total = view.total_steps
    return LiveRow(
        run_id=view.run.run_id,
        status=view.status,
        simulated=state.simulated,
        step=state.step,
        total_steps=total,
        loss=number(last, "loss") if last else None,
        tokens_per_s=view.config.during(state.step).tokens_per_step / pace_s if pace_s and view.config else None,
        left_s=training_left_s(state, view.config) if running and view.config else None,
        needs_person=view.status in NEEDS_PERSON or (running and any(job.needs_person for job in waiting)),
        what=_what(view),
    )


def _what(view: RunView) -> str:
    state = view.state
    if view.problem or state.message or view.status == INTERRUPTED:
        return view.problem or state.message or "its driver is not running"
    if view.ended:
        return ""
    waits = [f"{name} {queued(job.reason, None)}" for name, job in state.queued.items()]
    evaluates = [f"evaluating {count(m.milestone_tokens)}" for m in state.milestones.values() if m.status == "running"]
    stages = [name for name in state.running_stages if name != "evaluate"]
    return ", ".join([*stages, *waits, *evaluates]) or (state.warnings[-1] if state.warnings else "")


def _changed_unix_s(run: RunPaths) -> float:
    try:
        return os.stat(run.journal / "flow.jsonl").st_mtime
    except OSError:
        return 0.0
