"""The rows of all runs of a folder, kept in memory and refreshed when sizes or times of files change.

``poll`` looks at running and followed runs each time, at new ones when the folder has changed, and at all others every
few seconds. 5,000 unchanged runs cost a few calls of ``stat`` each. Runs that the index of `hlatctl runs` doesn't know
are read a few at a time, so that the first answer doesn't wait for them.

A heat map shows how evenly the processes of a run work, from the ``rank_times`` events of rank 0. Every 20 steps there
is one, with the least, the median and the largest time, and the slowest rank. A run of 2 M steps has 100,000 events;
they are read once, and then only the new ones are read.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hlatctl.report.run_list import (
    ALIVE,
    NEEDS_PERSON,
    Entry,
    Files,
    RunRow,
    entry_of,
    files_of,
    live_row,
    read_index,
    row_from,
    row_of,
    sparkline,
    write_index,
)
from hlatctl.report.run_view import RunView
from hlatctl.run.errors import RunNotFoundError
from hlatctl.run.journal import Event, JournalTail, no_steps
from hlatctl.run.paths import RunPaths
from hlatctl.run.runs import list_runs
from hlatctl.units import number

#: Maximum rows of a heat map: the ranks that were slowest most often.
MOST_RANKS = 64
DEFAULT_POINTS = 60
_KINDS = (b'"rank_times"', b'"train_started"')


class RankTimes:
    """The windows of a run that count, in order of steps, as far as it was read."""

    def __init__(self, run: RunPaths) -> None:
        self._windows: list[tuple[int, float, float, float, int, str]] = []
        self._what, self._tail = "own_work", JournalTail(run, wanted=_may_matter)

    def refresh(self) -> Self:
        """Read what is new; the first time, the whole journal.

        Raises:
            StorageError: a file of the journal can't be read.
        """
        for event in self._tail.stream():
            if event["kind"] == "train_started":
                self._supersede(int(event.get("resumed_from_step") or 0))
            elif event["kind"] == "rank_times" and event.get("step") is not None:
                self._add(event)
        return self

    def heat_map(self, points: int = DEFAULT_POINTS) -> dict[str, Any] | None:
        """Return the newest state of the windows, evenly chosen; None if the run has none.

        Returns:
            ``what``: what was timed in the newest window (a field of its event). ``steps``, ``median_s``, ``min_s``,
            ``max_s``, ``slowest_rank``, ``host``: per window; ``ranks`` and ``seconds[rank][window]``: of the ranks
            that were slowest, and None where another one was.
        """
        count = len(self._windows)
        if not count:
            return None
        chosen = [self._windows[index * count // min(points, count)] for index in range(min(points, count))]
        steps, medians, least, most, slowest, hosts = (list(values) for values in zip(*chosen, strict=True))
        ranks = sorted(rank for rank, _ in Counter(slowest).most_common(MOST_RANKS) if rank >= 0)
        seconds = [[s if who == rank else None for who, s in zip(slowest, most, strict=True)] for rank in ranks]
        return {
            "what": self._what,
            "steps": steps,
            "median_s": medians,
            "min_s": least,
            "max_s": most,
            "slowest_rank": slowest,
            "host": hosts,
            "ranks": ranks,
            "seconds": seconds,
        }

    def _supersede(self, after: int) -> None:
        while self._windows and self._windows[-1][0] > after:
            self._windows.pop()

    def _add(self, event: Event) -> None:
        step = int(event["step"])
        self._supersede(step - 1)
        self._what, slowest = str(event.get("what", self._what)), event.get("slowest_rank")
        self._windows.append(
            (
                step,
                *(number(event, name) for name in ("median_s", "min_s", "max_s")),  # type: ignore[arg-type]
                slowest if type(slowest) is int else -1,
                str(event.get("host", "")),
            )
        )


def _may_matter(line: bytes) -> bool:
    return any(kind in line for kind in _KINDS)


#: Number of remembered changes of the steps. A request for an older one gets all steps.
_CHANGES_KEPT = 1000
_MANY = ("step", "rank_times")


@dataclass(frozen=True)
class Kept:
    """A figure that is slow to compute, with its version and expiry time."""

    version: int
    until_s: float
    value: dict[str, Any]


class OpenRun(RunView):
    """A followed run. Threads can share it: hold ``lock`` while using it."""

    def __init__(self, run: RunPaths) -> None:
        super().__init__(run)
        self.lock = threading.RLock()
        self.goodput: Kept | None = None
        """What ``details`` has computed last."""
        self.is_shown = False
        """Whether a page has asked for it."""
        self._starting = threading.Lock()
        self._reading: threading.Thread | None = None
        self._changes: deque[tuple[int, int]] = deque(maxlen=_CHANGES_KEPT)
        self._events: list[Event] | None = None
        self._timing, self._rank_times = threading.Lock(), (0, RankTimes(run))

    def refresh(self) -> Self:
        """Read what is new, as :meth:`RunReader.refresh`."""
        with self.lock:
            return super().refresh()

    def read_within(self, timeout_s: float) -> bool:
        """Read what is new, as :meth:`refresh`; return whether it is done.

        The first reading goes on in a thread of its own after this time.
        """
        if not self.version:
            with self._starting:
                if self._reading is None or not self._reading.is_alive():
                    self._reading = threading.Thread(target=self.refresh, name="reading", daemon=True)
                    self._reading.start()
            self._reading.join(timeout_s)
            if self._reading.is_alive():
                return False
        self.refresh()
        return True

    def refresh_unless_busy(self) -> Self | None:
        """Return :meth:`refresh`, or None while another thread reads the run, which takes a minute for a long one."""
        if not self.lock.acquire(blocking=False):
            return None
        try:
            return self.refresh()
        finally:
            self.lock.release()

    def heat_map(self, points: int) -> dict[str, Any] | None:
        """Return the times of the run's processes; see :meth:`RankTimes.heat_map`.

        Raises:
            StorageError: a file of the journal can't be read.
        """
        with self._timing:  # and not the run's lock: it takes seconds for a long run, and its curves must not wait
            course, times = self._rank_times
            if course != self.course:
                times = RankTimes(self.run)
                self._rank_times = self.course, times
            return times.refresh().heat_map(points)

    @property
    def events(self) -> list[Event]:
        """The journal's events read so far, except steps and ``rank_times``, of which a run has millions.

        The first call reads the whole journal, at about 1 GB/s; later ones read only new bytes.

        Raises:
            StorageError: a file of the journal can't be read.
        """
        with self.lock:
            if self._events is None:
                newest_unix_s = self.state.last_event_unix_s
                found = JournalTail(self.run, wanted=_few).stream()
                self._events = [event for event in found if event["time_unix_s"] <= newest_unix_s]
            return self._events

    def changed_from_step(self, version: int) -> int | None:
        """Return the first step that has changed since a version; None if none has."""
        with self.lock:
            if version >= self.version:
                return None
            oldest = self._changes[0][0] if self._changes else 0
            if version + 1 < oldest:
                return 0
            return min((step for at, step in self._changes if at > version), default=None)

    def _open(self) -> None:
        self._events = self.goodput = None
        super()._open()
        self._changes.append((self.version, 0))

    def _advance(self, tail: JournalTail) -> None:
        before = [list(part) for part in self.state.steps.ranges]
        super()._advance(tail)
        after, steps = self.state.steps.ranges, self.state.steps
        if before != after:
            row = first_new_row(before, after)
            self._changes.append((self.version, steps.newest + 1 if row is None else int(steps.rows.at("step", row))))

    def _saw(self, event: Event) -> None:
        if self._events is not None and event["kind"] not in _MANY:
            self._events.append(event)


def first_new_row(before: list[list[int]], after: list[list[int]]) -> int | None:
    """Return the first row that counts now and is not at the same place as before; None if rows were only dropped."""
    for (start, stop), (new_start, new_stop) in zip(before, after, strict=False):
        if start != new_start:
            return new_start
        if stop != new_stop:
            same = min(stop, new_stop)
            if same < new_stop:
                return same
            following = after[after.index([new_start, new_stop]) + 1 :]
            return following[0][0] if following else None
    return after[len(before)][0] if len(after) > len(before) else None


def _few(line: bytes) -> bool:
    return no_steps(line) and b'"rank_times"' not in line


#: Minimum time between two scans of all runs; scans may take a twentieth of the time.
SCAN_S, _SCAN_SHARE = 5.0, 20
#: Maximum time that one poll spends reading new runs.
_READ_S = 0.5
#: Runs that are kept open: running ones, and those that a page shows.
_MOST_OPEN = 32
JsonRow = dict[str, Any]


@dataclass
class _Known:
    run: RunPaths
    row: JsonRow
    revision: int
    files: Files | None
    entry: Entry | None


class LiveIndex:
    """The runs of a folder. One thread polls; others read.

    Args:
        runs_dir: runs folder, which may not exist yet.
    """

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir, self.revision, self.complete = runs_dir, 0, False
        self._known: dict[str, _Known] = {}
        self._removed: dict[str, int] = {}
        self._open: OrderedDict[str, OpenRun] = OrderedDict()
        self._lock = threading.Lock()
        self._stored: dict[str, Entry] | None = None
        self._folder_mtime_ns, self._next_scan_s = -1, 0.0
        self._listed: dict[str, RunPaths] = {}

    def rows(self) -> list[JsonRow]:
        """Return the rows that are known, oldest first."""
        with self._lock:
            return [known.row for known in self._known.values()]

    def changed_since(self, revision: int) -> tuple[int, list[JsonRow], list[str]]:
        """Return the newest revision, and the rows and the ids of removed runs that changed since another one."""
        with self._lock:
            rows = [known.row for known in self._known.values() if known.revision > revision]
            gone = [run_id for run_id, at in self._removed.items() if at > revision]
            return self.revision, rows, gone

    def row(self, run_id: str) -> JsonRow:
        """Return the row of a run.

        Raises:
            RunNotFoundError: there is no such run.
        """
        with self._lock:
            if known := self._known.get(run_id):
                return known.row
        return self._look(self.find(run_id)) or self._keep_view(self.open(run_id), None)

    def find(self, run_id: str) -> RunPaths:
        """Return a run by its exact id.

        Raises:
            RunNotFoundError: there is no such run.
        """
        with self._lock:
            listed = self._listed.get(run_id)
        if listed and listed.config.is_file():
            return listed
        found = {run.run_id: run for run in list_runs(self.runs_dir)}
        if run_id not in found:
            raise RunNotFoundError(f"{run_id:.100}: no such run", hint="`hlatctl runs` lists them")
        return found[run_id]

    def open(self, run_id: str) -> OpenRun:
        """Return an open run, up to date.

        Raises:
            RunNotFoundError: there is no such run.
        """
        return self.opened(run_id).refresh()

    def opened(self, run_id: str) -> OpenRun:
        """Return an open run as far as it was read. Reading a long one for the first time takes a minute.

        Raises:
            RunNotFoundError: there is no such run.
        """
        run = self.find(run_id)
        with self._lock:
            opened = self._open.setdefault(run_id, OpenRun(run))
            self._open.move_to_end(run_id)
            opened.is_shown = True
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return opened

    def poll(self, followed: Iterable[str] = ()) -> bool:
        """Check everything that may have changed; return whether a row has.

        Args:
            followed: ids of runs to check in addition to the running ones.
        """
        began_s, before = time.monotonic(), self.revision
        is_scan = began_s >= self._next_scan_s
        self._list(force=is_scan)
        wanted = {*followed, *self._active()}
        late = []
        for run_id, run in self._listed.items():
            if run_id not in self._known and not self._is_stored(run):
                late.append(run)
            elif is_scan or run_id in wanted or run_id not in self._known:
                self._look(run)
        self._read_late(late)
        if is_scan:
            took_s = time.monotonic() - began_s
            self._next_scan_s = time.monotonic() + max(SCAN_S, _SCAN_SHARE * took_s)
        return self.revision != before

    def _list(self, *, force: bool) -> None:
        if self._stored is None:
            self._stored = read_index(self.runs_dir)
        mtime_ns = -1
        with suppress(OSError):
            mtime_ns = os.stat(self.runs_dir).st_mtime_ns
        if mtime_ns == self._folder_mtime_ns and not force:
            return
        self._folder_mtime_ns = mtime_ns
        listed = {run.run_id: run for run in list_runs(self.runs_dir)}
        with self._lock:
            self._listed = listed
            for run_id in self._known.keys() - listed.keys():
                self.revision += 1
                del self._known[run_id]
                self._removed[run_id] = self.revision
                self._open.pop(run_id, None)

    def _active(self) -> list[str]:
        return [run_id for run_id, known in self._known.items() if known.row["status"] in ALIVE]

    def _is_stored(self, run: RunPaths) -> bool:
        return bool(self._stored) and run.run_id in (self._stored or {})

    def _read_late(self, late: list[RunPaths]) -> None:
        """Read runs that are in no index, the newest first, and write the index when all are read."""
        deadline_s, was_complete = time.monotonic() + _READ_S, self.complete
        for run in reversed(late):
            self._look(run)
            if time.monotonic() > deadline_s:
                break
        self.complete = len(self._known) >= len(self._listed)
        if self.complete and not was_complete:
            self._store()

    def _store(self) -> None:
        entries = {run_id: known.entry for run_id, known in self._known.items() if known.entry}
        if entries != self._stored:
            write_index(self.runs_dir, entries)
        self._stored = {}

    def _look(self, run: RunPaths) -> JsonRow | None:
        """Return a run's row. None if another thread reads the run for the first time."""
        now, known = files_of(run), self._known.get(run.run_id)
        stored = (self._stored or {}).get(run.run_id) if known is None else known.entry
        if stored and now is not None and stored.files == now:
            row = row_from(run, stored)
            if known and known.row["status"] == row.status not in ALIVE:
                return known.row
            if row.status not in ALIVE:
                return self._keep(run, json_row(row, spark=stored.spark), now, stored)
        elif known and known.files is not None and known.files == now and known.row["status"] not in ALIVE:
            return known.row
        view = self._view(run)
        if view is None:
            return known.row if known else None
        return self._keep_view(view, now)

    def _keep_view(self, view: RunView, files: Files | None) -> JsonRow:
        run = view.run
        try:
            return self._keep(run, json_row(row_of(view), view), files, entry_of(view, files))
        except Exception as error:  # an unforeseen failure of one run must not hide the others
            problem = f"can't be shown ({type(error).__name__}: {error})"
            row = dataclasses.replace(_EMPTY, run_id=run.run_id, path=str(run.root), problem=problem)
            return self._keep(run, json_row(row), files, None)

    def _view(self, run: RunPaths) -> RunView | None:
        """Return a run's state. None if another thread is reading it.

        The run is open meanwhile, so that a page that asks for it doesn't read it a second time.
        """
        with self._lock:
            if run.run_id not in self._open:
                if len(self._open) >= _MOST_OPEN:
                    self._open.popitem(last=False)
                self._open[run.run_id] = OpenRun(run)
                self._open.move_to_end(run.run_id, last=False)
            opened = self._open[run.run_id]
        view = opened.refresh_unless_busy()
        if view and view.status not in ALIVE:
            with self._lock:
                if not opened.is_shown:
                    self._open.pop(run.run_id, None)
        return view

    def _keep(self, run: RunPaths, row: JsonRow, files: Files | None, entry: Entry | None) -> JsonRow:
        with self._lock:
            known = self._known.get(run.run_id)
            if known is None or known.row != row:
                self.revision += 1
                self._known[run.run_id] = _Known(run, row, self.revision, files, entry)
                self._removed.pop(run.run_id, None)
            else:
                known.files, known.entry = files, entry
        return row


def json_row(row: RunRow, view: RunView | None = None, *, spark: str = "") -> JsonRow:
    """Return a row as JSON, with the fields of `hlatctl watch` for a running run.

    Args:
        spark: its :func:`sparkline` if there is no view.
    """
    live = live_row(view) if view else None
    used = view.state.used.get("mfu") if view else None
    return {
        **dataclasses.asdict(row),
        "loss": _known(row.loss),
        "validation_loss": _known(row.validation_loss),
        "scores": {name: _known(value) for name, value in row.scores.items()},
        "spark": sparkline(view.state.steps.losses()) if view else spark,
        "tokens_per_s": live.tokens_per_s if live else None,
        "mfu": used if live and row.status in ALIVE else None,
        "left_s": live.left_s if live else None,
        "needs_person": live.needs_person if live else row.status in NEEDS_PERSON,
        "what": (live.what if live else row.problem) or None,
    }


def _known(value: float | str | None) -> float | None:
    """Return a number; None for one that is missing or not finite, because two NaN are not equal."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


#: A row without known values.
_EMPTY = RunRow(
    run_id="",
    status="damaged",
    simulated=False,
    step=0,
    total_steps=None,
    tokens=0,
    loss=None,
    validation_loss=None,
    created_unix_s=None,
    last_event_unix_s=None,
    experiment="",
    sweep="",
    name="",
    tags={},
    note="",
    overrides=[],
    scores={},
    node_hours=0.0,
    cost_usd=None,
    parent="",
    path="",
    problem=None,
)
