"""Copies a run's new events and files to one mirror, each once.

``mirrors/<name>.json``, the cursor, records how far a run has been copied. It is written after the mirror has accepted
a batch. A mirror also reports which steps it has: if it lacks some that the cursor counts, the journal is read again
from its beginning. If the cursor is lost, steps that some attempt has repeated are copied again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from conf.load import flatten
from conf.of_run import of_run
from conf.schema import Config
from flows.tracking.mirrors.base import (
    About,
    Attempts,
    Labels,
    Mirror,
    Outcome,
    Point,
    Scores,
    Service,
    Shown,
    courses,
    origin_of,
    point,
    scores,
)
from hlatctl.run import files
from hlatctl.run.files import DAMAGED, from_plain
from hlatctl.run.fold import read_state
from hlatctl.run.journal import FLOW_WRITER, OPERATOR_WRITER, Event, JournalTail, read_events, writer_events
from hlatctl.run.labels import LABELLED, marked
from hlatctl.run.paths import RunPaths
from hlatctl.run.redact import hide
from hlatctl.units import duration, utc


@dataclass
class Cursor:
    """What a mirror has.

    Args:
        target: address of the mirror; a different one starts over.
        offsets: copied bytes by journal file stem.
        last_step: newest step copied.
        attempt: newest attempt whose start was handled.
        starts: known starts of attempts; see :class:`Attempts`.
        scores: newest step at the time that each evaluation was copied, by ``Scores.key``.
        files: ``[bytes, mtime_ns]`` of each copied file.
        is_open: the session of the last copy has not ended: the mirror may lack the newest entries.
        labels, outcome: SHA-256 of those copied last; empty: none.
        kept: what the mirror needs to continue.
    """

    target: str
    offsets: dict[str, int] = field(default_factory=dict)
    last_step: int = 0
    attempt: int = 0
    starts: dict[str, list[int]] = field(default_factory=dict)
    scores: dict[str, int] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)
    is_open: bool = False
    labels: str = ""
    outcome: str = ""
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, target: str) -> Cursor:
        """Read the cursor of the last copy; return a new one if it is missing, damaged or of another target."""
        try:
            cursor = from_plain(cls, files.read_sealed_json(path))
        except (OSError, *DAMAGED):
            return cls(target)
        return cursor if cursor.target == target else cls(target)

    def write(self, path: Path) -> None:
        """Write it durably."""
        files.write_sealed_json(path, dataclasses.asdict(self))

    def forget_after(self, step: int) -> None:
        """Count only what was copied up to this step, so that the rest is copied again."""
        self.offsets, self.last_step, self.labels, self.outcome = {}, step, "", ""
        self.forget_scores_after(step)

    def forget_scores_after(self, step: int) -> None:
        """Count no scores that were copied after this step, because the mirror lacks them."""
        self.scores = {key: at for key, at in self.scores.items() if at <= step}


#: Events between two writes of the cursor, so that the memory doesn't grow with the run.
_EVENTS_AT_ONCE = 1_000
#: Kinds of events that change the labels. ``stage_finished``: provenance is recorded.
_LABELS = (LABELLED, "config_amended", "amendment_applied", "stage_finished")
_OUTCOMES = ("head_started", "run_finished")


class Copier:
    """Copies one run to one mirror, which it opens when there is something to copy and then keeps open.

    After an error it must be closed and replaced by another one, which continues from the cursor.

    Args:
        name: name of the mirror.
        service: its service.
        say: called with the progress of a long copy.
    """

    def __init__(
        self, run: RunPaths, config: Config, name: str, service: Service, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._run, self._config, self._service, self._say_progress = run, config, service, say
        self._path = run.mirror_cursor(name)
        self._cursor = Cursor.read(self._path, service.target)
        self._shown = Shown(config.total_steps)
        self._mirror: Mirror | None = None
        self._attempts = Attempts(self._cursor.starts)
        self._shift_s = 0.0
        self._contract = ""
        self._points: list[Point] = []
        self._copied = 0

    def copy_new(self, *, even_if_nothing_is_new: bool = False) -> int:
        """Copy new events; return how many the mirror lacked.

        Args:
            even_if_nothing_is_new: ask the service what it has, because somebody may have deleted it there.

        Raises:
            OSError, or an exception of the mirror's library: the mirror does not accept them.
            StorageError: the journal can't be read, or the cursor can't be written.
        """
        mirror = self._mirror or self._opened(even_if_nothing_is_new)
        if mirror is None:
            return 0
        self._copied = 0
        self._find_starts()
        tail = JournalTail(self._run, self._cursor.offsets, wanted=self._shown.line)
        progress = Progress(sum(path.stat().st_size for path in self._run.journal.glob("*.jsonl")), self._say_progress)
        stream = tail.stream()
        while events := list(itertools.islice(stream, _EVENTS_AT_ONCE)):
            self._copy(mirror, events)
            self._cursor.offsets = tail.offsets
            self._save(mirror)
            progress.reached(self._cursor.last_step, tail.bytes_read)
        if self._unsaid:
            self._labels(mirror)
            self._outcome(mirror)
            self._save(mirror)
        if changed := self._changed_files():
            for path, version in changed.items():
                name = path.relative_to(self._run.root).as_posix()
                mirror.file(path, name)
                self._cursor.files[name] = version
            self._save(mirror)
        return self._copied

    def close(self) -> None:
        """Close the mirror if it is open.

        Raises:
            OSError, or an exception of the mirror's library: the mirror didn't accept everything.
        """
        mirror, self._mirror = self._mirror, None
        if mirror:
            mirror.close()
            if self._cursor.is_open:
                self._cursor.is_open = False
                self._cursor.write(self._path)

    def abandon(self) -> None:
        """Close the mirror after an error, without counting anything that the cursor doesn't count yet."""
        mirror, self._mirror = self._mirror, None
        if mirror:
            mirror.close()

    def _save(self, mirror: Mirror) -> None:
        self._cursor.kept, self._cursor.is_open = mirror.flush(), self._service.lasting
        self._cursor.write(self._path)

    def _opened(self, even_if_nothing_is_new: bool) -> Mirror | None:
        created = next((e for e in writer_events(self._run, FLOW_WRITER) if e["kind"] == "run_created"), None)
        if created is None or not (even_if_nothing_is_new or self._cursor.is_open or self._has_new()):
            return None
        about = self._about(created)
        self._shift_s = about.shift_s
        self._mirror = mirror = self._service.open(about, self._cursor.kept, self._cursor.last_step)
        cursor = self._cursor
        if mirror.is_new:
            self._cursor = cursor = Cursor(cursor.target)
            self._attempts = Attempts(cursor.starts)
        elif not cursor.offsets:
            self._recover(mirror)
        elif mirror.last_step < cursor.last_step:
            cursor.forget_after(mirror.last_step)
        if cursor.is_open:
            cursor.labels = cursor.outcome = ""
        cursor.last_step = mirror.last_step
        return mirror

    def _recover(self, mirror: Mirror) -> None:
        """Continue without a cursor, from the last step that no attempt repeats, because only its values are known."""
        self._find_starts()
        self._cursor.attempt = self._attempts.newest
        common = self._attempts.common()
        if common is not None and common[0] < mirror.last_step:
            mirror.rewind(*common)

    @property
    def _unsaid(self) -> bool:
        return not (self._cursor.labels and self._cursor.outcome)

    def _has_new(self) -> bool:
        offsets = self._cursor.offsets
        sizes = {path.stem: path.stat().st_size for path in self._run.journal.glob("*.jsonl") if path.is_file()}
        return any(size > offsets.get(stem, 0) for stem, size in sizes.items()) or bool(self._changed_files())

    def _find_starts(self) -> None:
        """Find the starts of attempts in new events, without parsing steps (0.3 s for a million of them)."""
        tail = JournalTail(self._run, self._cursor.offsets, wanted=lambda line: b'"train_started"' in line)
        for event in tail.stream():
            if event["kind"] == "train_started":
                self._attempts.add(event, self._config.tokens_per_step)

    def _changed_files(self) -> dict[Path, list[int]]:
        """Return the files to copy, and bytes and time of each."""
        run, found = self._run, dict[Path, list[int]]()
        if not self._service.takes_files:
            return found
        reports = (path for path in run.report.rglob("*") if not path.name.startswith("."))
        for path in (run.config, run.provenance, *run.evals.rglob("results.json"), *reports):
            if path.is_file():
                version = [path.stat().st_size, path.stat().st_mtime_ns]
                if self._cursor.files.get(path.relative_to(run.root).as_posix()) != version:
                    found[path] = version
        return found

    def _about(self, created: Event) -> About:
        values, simulated = flatten(of_run(self._run, number=0)), bool(created.get("simulated"))
        created_unix_s = float(created["time_unix_s"])
        return About(
            run_id=self._run.run_id,
            root=self._run.root,
            simulated=simulated,
            sweep=str(created.get("sweep") or ""),
            trial=created.get("trial"),
            created_unix_s=self._run.config.stat().st_mtime if simulated else created_unix_s,
            journal_created_unix_s=created_unix_s,
            config={key: _plain(value) for key, value in values.items()},
        )

    def _copy(self, mirror: Mirror, events: list[Event]) -> None:
        kinds = set()
        for event in events:
            kinds.add(kind := event["kind"])
            if kind == "step":
                self._add(event)
            elif kind == "train_started":
                self._flush(mirror)
                self._started(mirror, event)
            elif kind == "eval_finished":
                self._flush(mirror)
                self._scores(mirror, event)
            else:
                mirror.further(event)
        self._flush(mirror)
        if kinds.intersection(_LABELS):
            self._labels(mirror)
        if "run_finished" in kinds:  # also if it says what the last one said: the report's numbers may be new
            self._cursor.outcome = ""
        if kinds.intersection(_OUTCOMES):
            self._outcome(mirror)

    def _add(self, event: Event) -> None:
        if event["step"] > self._cursor.last_step and self._shown.step(event["step"]) and self._attempts.counts(event):
            self._points.append(point(event, self._shift_s))
            self._cursor.last_step = event["step"]

    def _flush(self, mirror: Mirror) -> None:
        points, self._points = self._points, []
        if points:
            mirror.steps(points)
            self._copied += len(points)

    def _started(self, mirror: Mirror, event: Event) -> None:
        """Handle the start of an attempt: remove steps from the mirror that the attempt repeats."""
        cursor, attempt = self._cursor, int(event["attempt"])
        step, tokens = self._attempts.add(event, self._config.tokens_per_step)
        if attempt > cursor.attempt and step < mirror.last_step:
            lost_scores = mirror.rewind(step, tokens)
            cursor.last_step = mirror.last_step
            if lost_scores:
                self._repeat_scores(mirror, step)
        cursor.attempt = max(cursor.attempt, attempt)

    def _repeat_scores(self, mirror: Mirror, step: int) -> None:
        kept = self._cursor.scores
        self._cursor.forget_scores_after(step)
        for event in read_events(self._run, wanted=lambda line: b'"eval_finished"' in line):
            if event["kind"] == "eval_finished" and self._scores_of(event).key in kept:
                self._scores(mirror, event)

    def _scores(self, mirror: Mirror, event: Event) -> None:
        found = self._scores_of(event)
        if found.key not in self._cursor.scores and found.values:
            mirror.scores(found)
            self._cursor.scores[found.key] = mirror.last_step
            self._copied += 1

    def _scores_of(self, event: Event) -> Scores:
        self._contract = self._contract or read_state(self._run).contract
        return scores(event, self._contract, self._shift_s)

    def _labels(self, mirror: Mirror) -> None:
        state = read_state(self._run)
        labelled = (event for event in writer_events(self._run, OPERATOR_WRITER) if event["kind"] == LABELLED)
        removed = {key for event in labelled for key in event.get("untag", [])}
        labels = Labels(
            name=marked(state.labels.name or self._run.run_id, simulated=state.simulated),
            tags=dict(state.labels.tags),
            removed=sorted(removed - set(state.labels.tags)),
            notes=[f"{utc(note.time_unix_s)}, {note.by}: {note.text}" for note in state.labels.notes],
            amended={key: hide(course) for key, course in courses(state.amendments).items()},
            facts=_facts(self._run),
        )
        self._cursor.labels = self._say(self._cursor.labels, asdict(labels), partial(mirror.labels, labels))

    def _outcome(self, mirror: Mirror) -> None:
        state = read_state(self._run)
        status = "running" if state.status == "created" else state.status
        ended = [
            event["time_unix_s"] for event in writer_events(self._run, FLOW_WRITER) if event["kind"] == "run_finished"
        ]
        time_unix_s = ended[-1] if ended and status != "running" else state.last_event_unix_s
        outcome = Outcome(
            status=status, message=hide(state.message), step=state.step, time_unix_s=time_unix_s + self._shift_s
        )
        said = {"status": outcome.status, "message": outcome.message, "step": outcome.step}
        self._cursor.outcome = self._say(self._cursor.outcome, said, partial(mirror.outcome, outcome))

    def _say(self, before: str, value: dict[str, Any], say: Callable[[], None]) -> str:
        now = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        if now != before:
            say()
            self._copied += 1
        return now


def _plain(value: object) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float) else hide(str(value))


def _facts(run: RunPaths) -> dict[str, str]:
    try:
        provenance = dict(files.read_json(run.provenance))
        facts = {
            "commit": (provenance.get("git") or {}).get("commit"),
            **origin_of(run, provenance.get("argv") or []),
            "python": str(provenance.get("python", "")).split(" ")[0],
            "host": (provenance.get("host") or {}).get("name"),
        }
    except (OSError, *DAMAGED):
        return {}
    return {name: hide(str(value)) for name, value in facts.items() if value}


class Progress:
    """Prints a line with steps, rate and time left every 5 s.

    Args:
        total_bytes: size of the journal.
        say: called with each line.
        now_s: the clock.
    """

    _EVERY_S = 5.0
    #: Number of newest lines that determine the rate, because it depends on what else the machine does.
    _NEWEST = 6

    def __init__(
        self, total_bytes: int, say: Callable[[str], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._total_bytes, self._say, self._now_s = total_bytes, say, now_s
        self._points: deque[tuple[float, int, int]] = deque(maxlen=self._NEWEST)

    def reached(self, step: int, done_bytes: int) -> None:
        """Report that everything up to this step, and this many bytes of the journal, is copied."""
        now_s = self._now_s()
        if not self._points:
            self._points.append((now_s, step, done_bytes))
            return
        if now_s - self._points[-1][0] < self._EVERY_S:
            return
        self._points.append((now_s, step, done_bytes))
        since_s, since_step, since_bytes = self._points[0]
        share = done_bytes / max(self._total_bytes, done_bytes, 1)
        text = f"step {step:,} ({share:.0%} of the journal), {(step - since_step) / (now_s - since_s):,.0f} steps/s"
        if done_bytes > since_bytes:
            left_s = (now_s - since_s) / (done_bytes - since_bytes) * max(0, self._total_bytes - done_bytes)
            text += f", {duration(left_s)} left"
        self._say(text)
