"""Computes a run's state from its events, with a handler for each kind of event.

The state is kept next to the journal, so that reading a run doesn't take longer as it grows. ``journal/.fold/state``
holds the state after the first events of the journal, and how far each writer's file was read. ``journal/.fold/rows-*``
hold its steps. The journal decides: a reader folds it from the beginning if these files are missing, damaged, of
another version of this code, or don't fit the journal. ``docs/decisions/0029-a-kept-fold.md`` explains why the result
is the same.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hlatctl.run import journal, labels, stopping
from hlatctl.run.events import RECOVERY_PHASES
from hlatctl.run.files import DAMAGED, from_plain, read_bytes
from hlatctl.run.journal import OPERATOR_WRITER, TRAIN_WRITER, Event, JournalTail, Place
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import (
    NO_SPARE_NODE,
    TRAIN_JOB,
    USED,
    AmendmentState,
    AttemptState,
    ContractScores,
    EvaluationProgress,
    ForecastState,
    MilestoneState,
    ProfileState,
    QueuedJob,
    RunState,
    StageState,
)
from hlatctl.run.steps import Home, Rows, Segment, StepSeries, segment_name, write_derived

#: ``what`` of the alarm that evaluation falls behind training.
BEHIND = "evaluation_behind"


_Numbered = TypeVar("_Numbered", AttemptState, AmendmentState, ProfileState)

#: New bytes of journal after which the state is kept again: about 7,000 steps, which fold in 0.1 s.
KEEP_BYTES = 2 << 20
#: The newest events are not included: a host whose clock is slow may still write earlier ones.
_SETTLED_S = 600.0
#: Bytes at the beginning of each file, and before its offset, that must be unchanged.
_WITNESS_BYTES = 1024
#: Maximum size of a state, which has up to 65,536 rows of 128 bytes, attempts and checkpoints.
_MAX_BYTES = 256 << 20
#: The state is discarded if one of these modules has changed.
_CODE = ("events", "fold", "journal", "labels", "state", "step_metrics", "steps", "stopping")


class _UnfitError(Exception):
    """The stored state doesn't fit the journal."""


def _home(run: RunPaths) -> Home:
    return Home(run.fold, lambda: fold(JournalTail(run).stream()).steps.rows)


def _continue(run: RunPaths, state: RunState, tail: JournalTail) -> tuple[RunState, JournalTail]:
    """Apply the rest of the journal, and store the state on the way if there is much.

    Raises:
        _UnfitError: an event belongs before the stored ones.
    """
    began_unix_s, begun_bytes = tail.clock_unix_s, tail.bytes_read
    settled_unix_s = _newest_unix_s(run) - _SETTLED_S
    sizes = (path.stat().st_size for path in run.journal.glob("*.jsonl") if path.is_file())
    may_keep = sum(sizes) - begun_bytes >= KEEP_BYTES
    for event in tail.stream():
        if tail.clock_unix_s < began_unix_s:
            raise _UnfitError
        if may_keep and tail.clock_unix_s > settled_unix_s:
            may_keep = False
            if tail.bytes_read - begun_bytes >= KEEP_BYTES and not tail.ends_damaged:
                _keep(run, state, tail)
        apply(state, event)
    return state, tail


def _newest_unix_s(run: RunPaths) -> float:
    events = (journal.last_event(path) for path in run.journal.glob("*.jsonl") if path.is_file())
    return max((journal.order_unix_s(event) for event in events if event), default=-math.inf)


def _keep(run: RunPaths, state: RunState, tail: JournalTail) -> None:
    """Write the state. An unwritable folder or a full disk is not an error."""
    rows = state.steps.rows
    with suppress(OSError):
        head = {
            "code": code(),
            "byteorder": sys.byteorder,
            "clock_unix_s": max(place[1] for place in tail.places.values()),
            "places": tail.places,
            "witnesses": {stem: _witness(run, stem, place[0]) for stem, place in tail.places.items()},
            "state": {name: value for name, value in vars(state).items() if name != "steps"},
            "ranges": state.steps.ranges,
            "others": rows.others,
            "segments": [[segment.crc, segment.columns] for segment in rows.segments],
            "rows": len(rows.tail[0]),
            "thinned": [rows.stride, list(rows.thinned)],
        }
        body = [json.dumps(head, default=vars).encode() + b"\n", *(column.tobytes() for column in rows.tail)]
        write_derived(run.fold / "state", [b"%08x\n" % _crc(body), *body])
        known = {segment.path.name for segment in rows.segments}
        for path in run.fold.glob("rows-*"):  # from an earlier version of the journal
            if path.name not in known and int(path.name[5:10]) < len(known):
                path.unlink()


def _kept(run: RunPaths) -> tuple[RunState, JournalTail]:
    """Return the stored state.

    Raises:
        _UnfitError: it is damaged, of other code, or doesn't fit the journal.
        OSError: there is none, or it can't be read.
    """
    content = read_bytes(run.fold / "state", most=_MAX_BYTES)
    end = content.index(b"\n", 9)
    head = json.loads(content[9:end])
    if int(content[:8], 16) != zlib.crc32(memoryview(content)[9:]) or head["code"] != code():
        raise _UnfitError
    if head["byteorder"] != sys.byteorder:
        raise _UnfitError
    places: dict[str, Place] = {stem: tuple(place) for stem, place in head["places"].items()}
    for stem, place in places.items():
        if _witness(run, stem, place[0]) != head["witnesses"][stem]:
            raise _UnfitError
    state = from_plain(RunState, {**head["state"], "steps": StepSeries(_home(run))})
    state.steps.ranges = head["ranges"]
    _restore(state.steps.rows, run.fold, head, memoryview(content)[end + 1 :])
    tail = JournalTail(run)
    tail.places, tail.clock_unix_s = places, head["clock_unix_s"]
    return state, tail


def _restore(rows: Rows, folder: Path, head: dict[str, Any], columns: memoryview) -> None:
    rows.segments = [
        Segment(folder / segment_name(number, crc), crc, count) for number, (crc, count) in enumerate(head["segments"])
    ]
    rows.others = head["others"]
    rows.stride, rows.thinned = head["thinned"][0], array("d", head["thinned"][1])
    rows.tail += [array("d") for _ in rows.others]
    length = 8 * head["rows"]
    for number, column in enumerate(rows.tail):
        column.frombytes(columns[number * length : (number + 1) * length])


def _witness(run: RunPaths, stem: str, offset: int) -> int:
    """Return a checksum of the beginning of a file and of the bytes before an offset; -1 if it is shorter.

    Raises:
        OSError: it can't be read.
    """
    path = run.journal / f"{stem}.jsonl"
    if not path.is_file():  # opening a named pipe would block forever
        return -1
    with path.open("rb") as file:
        begin = file.read(min(_WITNESS_BYTES, offset))
        file.seek(max(0, offset - _WITNESS_BYTES))
        before = file.read(min(_WITNESS_BYTES, offset))
    complete = len(before) == min(_WITNESS_BYTES, offset)
    return zlib.crc32(before, zlib.crc32(begin)) if complete else -1


def _crc(parts: list[bytes]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


@cache
def code() -> int:
    """Return a checksum of the modules that fold, as a version number."""
    return source_crc(Path(__file__).parent, _CODE)


def source_crc(folder: Path, modules: Iterable[str], crc: int = 0) -> int:
    """Return a checksum of the source of modules.

    Args:
        modules: names of the modules.
        crc: checksum to continue from.
    """
    for name in modules:
        crc = zlib.crc32((folder / f"{name}.py").read_bytes(), crc)
    return crc


def fold(events: Iterable[Event]) -> RunState:
    """Return the state that events describe, in order of time. Unknown kinds are ignored."""
    state = RunState()
    for event in events:
        apply(state, event)
    return state


def read_state(run: RunPaths) -> RunState:
    """Return the state that a run's journal describes. The cost grows little with the run.

    Raises:
        StorageError: a file of the journal can't be read.
    """
    return follow(run)[0]


def follow(run: RunPaths) -> tuple[RunState, JournalTail]:
    """Return a run's state, and its journal to continue from there.

    Raises:
        StorageError: a file of the journal can't be read.
    """
    try:
        return _continue(run, *_kept(run))
    except (_UnfitError, OSError, *DAMAGED):
        return _continue(run, RunState(steps=StepSeries(_home(run))), JournalTail(run))


def apply(state: RunState, event: Event) -> None:
    """Apply one more event to a state. A damaged event adds a warning instead."""
    state.last_event_unix_s = max(state.last_event_unix_s, event["time_unix_s"])
    passed_s = event["time_unix_s"] - state.worked_unix_s
    if passed_s > 0.0 and event.get("writer") != OPERATOR_WRITER:  # a person can add a note to a run that is dead
        state.worked_unix_s = event["time_unix_s"]
        # Nobody knows for how much of the time without a driver the nodes were held.
        if state.has_nodes and event["kind"] != "head_started" and state.holds_nodes:
            state.hold(passed_s)
    handler = _HANDLERS.get(event["kind"])
    if str(event.get("writer", "")).startswith(TRAIN_WRITER) and (attempt := _attempt_of(state, event)):
        attempt.train_events += 1
        attempt.newest_train_unix_s = event["time_unix_s"]
    if not handler:
        return
    try:
        handler(state, event)
    except DAMAGED:
        name = f"{event.get('writer', 'journal')} {event['seq']}"
        state.warnings.append(f"event {name} ({event['kind']}): damaged, ignored")


def _run_created(state: RunState, event: Event) -> None:
    state.run_id = event.get("run_id", "")
    state.simulated = bool(event.get("simulated", False))
    state.evaluates, state.sweep = str(event.get("evaluates", "")), str(event.get("sweep") or "")
    state.imported = dict(event.get("imported") or {})
    state.argv = list(event.get("argv", []))
    state.created_unix_s = event["time_unix_s"]


def _forecast_made(state: RunState, event: Event) -> None:
    state.forecast = ForecastState.of(event)


def _head_started(state: RunState, event: Event) -> None:
    # The run is driven again: an earlier outcome, or request to stop an earlier driver, no longer counts.
    state.status, state.message = "running", ""
    stopping.fold_start(state, event)
    state.has_nodes = bool(state.attempts) and state.attempts[-1].ended_unix_s is None
    state.queued = {name: job for name, job in state.queued.items() if name == TRAIN_JOB}  # others end with a driver
    for milestone in state.milestones.values():  # the driver that took them has ended
        milestone.taken_unix_s = None


def _stage(status: str) -> Any:
    def handler(state: RunState, event: Event) -> None:
        name = event.get("stage", "")
        state.has_nodes |= status == "running" and name == "preflight"
        before = state.stages.get(name)
        state.stages[name] = StageState(
            name,
            status,
            event.get("fingerprint", ""),
            event.get("wall_s", 0.0),
            event.get("why") or event.get("message") or "",
            event.get("outputs") or (before.outputs if before else {}),
        )

    return handler


def _append(items: list[_Numbered], new: _Numbered) -> None:
    """Append to a list that is ordered by number, so that an item is found without going through all of them.

    Raises:
        ValueError: the number is not larger than the newest one. Only a damaged or edited journal has such an event.
    """
    if items and new.number <= items[-1].number:
        raise ValueError(f"number {new.number} after {items[-1].number}")
    items.append(new)


def _numbered(items: list[_Numbered], number: int) -> _Numbered | None:
    """Return the item with a number; usually it is the newest one."""
    if items and items[-1].number == number:
        return items[-1]
    at = bisect_left(items, number, key=lambda item: item.number)
    return items[at] if at < len(items) and items[at].number == number else None


def _attempt_started(state: RunState, event: Event) -> None:
    before = state.attempt
    attempt = AttemptState(
        event["attempt"],
        event.get("handle", {}),
        event["time_unix_s"],
        max_checkpoint_step=event.get("max_checkpoint_step"),
        config_number=event.get("config_number") or 0,
        oom_kills=event.get("oom_kills"),
        left_out_hosts=[str(host) for host in event.get("left_out_hosts") or []],
    )
    _append(state.attempts, attempt)
    if before:
        before.rejected_hosts = [str(host) for host in event.get("rejected_hosts") or []]
    state.train_stopped, state.has_nodes = "", True
    _fail_profile(state)


def _fail_profile(state: RunState) -> None:
    """Fail the profile that was asked of an attempt that is over: nothing will make it."""
    profile, newest = state.open_profile, state.attempt
    if profile and newest and newest.number >= profile.attempt:
        attempt = _numbered(state.attempts, profile.attempt)
        if newest.number > profile.attempt or (attempt and attempt.ended_unix_s is not None):
            profile.status, profile.message = "failed", f"attempt {profile.attempt} ended before"


def _attempt_of(state: RunState, event: Event) -> AttemptState | None:
    return _numbered(state.attempts, event["attempt"])


def _attempt_ended(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.ended_unix_s = event["time_unix_s"]
        attempt.cause = event.get("cause", "")
        attempt.evidence = event.get("evidence", "")
        attempt.decision = event.get("decision", "")
        state.has_nodes &= attempt.decision not in ("done", "stop")
        attempt.why = event.get("why", "")
        attempt.signature = event.get("signature", "")
        attempt.next_max_checkpoint_step = event.get("max_checkpoint_step")
        attempt.blamed_hosts = [str(host) for host in event.get("blamed_hosts") or []]
        attempt.detect_s, attempt.decide_s = event.get("detect_s"), event.get("decide_s")
        state.queued.pop(TRAIN_JOB, None)
        _fail_profile(state)


def _hang(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.hang = str(event["evidence"])


def _node_notice(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    hosts = [str(host) for host in event["hosts"]]
    if attempt:
        attempt.noticed_hosts.setdefault(str(event["what"]), []).extend(hosts)
    if attempt and event.get("ends_unix_s") is not None:
        attempt.notice = str(event["message"])
        attempt.leaving_hosts += hosts
        attempt.leaves_unix_s = max(attempt.leaves_unix_s, float(event["ends_unix_s"]))
    _warning(state, event)


def _straggler(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.stragglers.append(event)
    _warning(state, event)


def _corruption_checked(state: RunState, event: Event) -> None:
    state.trusted_step = int(event["step"])


def _corruption_suspected(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.corruption = str(event.get("message") or "a process computes wrong numbers")
        attempt.corrupt_hosts = [str(host) for host in event.get("blamed_hosts") or []]
    _warning(state, event)


def _nonfinite(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    if attempt and event.get("ranks"):
        attempt.corrupt_hosts = [str(host) for host in event.get("blamed_hosts") or []]


def _train_started(state: RunState, event: Event) -> None:
    resumed = int(event.get("resumed_from_step", 0))
    if state.trusted_step is not None:
        state.trusted_step = min(state.trusted_step, resumed)
    state.steps.supersede(after=resumed)
    del state.spikes[bisect_right(state.spikes, resumed, key=_step_of) :]
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.resumed_from_step = resumed
        attempt.log_freq = max(1, event.get("log_freq") or 1)
        attempt.began_unix_s = event["time_unix_s"]
        attempt.starting = {name: event.get(name) for name in ("groups_s", "load_s", "warm", "restored_from")}
    state.peak_flops_per_s = event.get("peak_flops_per_s")


def _step(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    newest = state.attempt
    superseded = newest and newest.resumed_from_step is not None and newest.resumed_from_step < int(event["step"])
    if newest and event["attempt"] < newest.number and superseded:
        return  # a late event of a superseded attempt
    state.steps.add(event)
    state.used = {name: event[name] for name in USED if event.get(name) is not None}
    if attempt:
        attempt.last_step = int(event["step"])
        if attempt.first_step_unix_s is None:
            attempt.first_step_unix_s = event["time_unix_s"]


def _recovered(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.recovery = {name: event.get(name) for name in ("cause", "warm", "restored_from", *RECOVERY_PHASES)}


def _compile_cache(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.compile_cache = {key: event[key] for key in ("hits", "misses", "wall_s") if key in event}


def _checkpoint_committed(state: RunState, event: Event) -> None:
    step = int(event["step"])
    _trusted("committed")(state, event)
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.newest_checkpoint = max(attempt.newest_checkpoint, step)


def _trusted(degree: str) -> Any:
    def handler(state: RunState, event: Event) -> None:
        step = int(event["step"])
        # A checkpoint that was rejected in one place can be verified in another.
        if not _has_step(state.checkpoints, step):
            insort(state.checkpoints, step)
        if not (degree == "verified" and state.trust.get(step) == "survived"):
            state.trust[step] = degree

    return handler


def _checkpoint_gone(state: RunState, event: Event) -> None:
    step = int(event["step"])
    if _has_step(state.checkpoints, step):
        del state.checkpoints[bisect_left(state.checkpoints, step)]
    state.trust.pop(step, None)


def _has_step(steps: list[int], step: int) -> bool:
    at = bisect_left(steps, step)
    return at < len(steps) and steps[at] == step


def _milestone(state: RunState, event: Event) -> None:
    tokens = int(event["milestone_tokens"])
    due_unix_s = float(event["time_unix_s"])
    state.milestones.setdefault(tokens, MilestoneState(tokens, int(event["step"]), due_unix_s=due_unix_s))


def _evaluated(state: RunState, event: Event) -> MilestoneState:
    _milestone(state, event)
    return state.milestones[int(event["milestone_tokens"])]


def _eval_started(state: RunState, event: Event) -> None:
    milestone = _evaluated(state, event)
    tasks = [str(task) for task in event.get("tasks", [])]
    milestone.progress = EvaluationProgress(tasks, updated_unix_s=float(event["time_unix_s"]))
    if milestone.status != "evaluated":
        milestone.status, milestone.message = "running", ""


def _eval_task_started(state: RunState, event: Event) -> None:
    progress = state.milestones[int(event["milestone_tokens"])].progress
    if progress:
        progress.task, progress.done, progress.total, progress.done_before = str(event["task"]), 0, 0, None
        progress.began_unix_s = float(event["time_unix_s"])
        progress.task_started_unix_s = progress.updated_unix_s = progress.began_unix_s
        progress.counted = []


def _eval_progress(state: RunState, event: Event) -> None:
    progress = state.milestones[int(event["milestone_tokens"])].progress
    if progress:
        progress.task, progress.done, progress.total = str(event["task"]), int(event["done"]), int(event["total"])
        progress.updated_unix_s = float(event["time_unix_s"])
        if progress.done_before is None:
            progress.done_before, progress.task_started_unix_s = progress.done, progress.updated_unix_s
        progress.count()


def _eval_finished(state: RunState, event: Event) -> None:
    milestone = _evaluated(state, event)
    scores = ContractScores(
        str(event.get("contract", "")), dict(event.get("scores", {})), dict(event.get("skipped", {}))
    )
    milestone.judgements[scores.contract] = scores
    state.contract = state.contract or scores.contract
    # Scores under different contracts are never mixed. Show those under the run's first one.
    shown = milestone.judgements.get(state.contract, scores)
    milestone.scores, milestone.skipped, milestone.contract = shown.scores, shown.skipped, shown.contract
    if scores.contract == state.contract:
        if milestone.taken_unix_s is not None:
            milestone.wall_s = float(event["time_unix_s"]) - milestone.taken_unix_s
        if milestone.progress:
            milestone.task_wall_s |= milestone.progress.task_wall_s
    milestone.taken_unix_s = None
    milestone.is_partial = bool(event.get("chosen")) and (milestone.is_partial or milestone.status != "evaluated")
    milestone.status, milestone.message, milestone.progress = "evaluated", "", None
    if state.evaluation_behind:  # another alarm is allowed once no milestone waits
        state.evaluation_behind = any(milestone.waits for milestone in state.milestones.values())


def _eval_failed(state: RunState, event: Event) -> None:
    milestone = _evaluated(state, event)
    milestone.progress, milestone.last_failure = None, str(event.get("message", ""))
    if event.get("final", True):
        milestone.taken_unix_s = None
    if milestone.status != "evaluated":  # otherwise an evaluation under another contract failed
        milestone.status = "failed" if event.get("final", True) else "due"
        milestone.message = str(event.get("message", ""))


def _eval_stopped(state: RunState, event: Event) -> None:
    milestone = _evaluated(state, event)
    milestone.progress = milestone.taken_unix_s = None
    if milestone.status != "evaluated":
        milestone.status, milestone.message = "due", "interrupted by a stop"


def _eval_taken(state: RunState, event: Event) -> None:
    state.milestones[int(event["milestone_tokens"])].taken_unix_s = float(event["time_unix_s"])


def _eval_task_finished(state: RunState, event: Event) -> None:
    """Store the time of a task that ran without a break; one that an earlier try began takes less."""
    progress = state.milestones[int(event["milestone_tokens"])].progress
    task = str(event["task"])
    if progress and progress.task == task and progress.began_unix_s and not progress.done_before:
        progress.task_wall_s[task] = float(event["time_unix_s"]) - progress.began_unix_s


def _job_queued(state: RunState, event: Event) -> None:
    name, reason = str(event["job"]), str(event.get("reason") or "")
    since_unix_s = state.queued[name].since_unix_s if name in state.queued else float(event["time_unix_s"])
    start = event.get("expected_start_unix_s")
    start_unix_s, needs_person = None if start is None else float(start), event.get("code") == NO_SPARE_NODE
    state.queued[name] = QueuedJob(reason, since_unix_s, start_unix_s, needs_person)


def _job_started(state: RunState, event: Event) -> None:
    _job_left_queue(state, event)
    newest = state.attempt
    if event["job"] == TRAIN_JOB and newest and newest.number == event["attempt"]:
        newest.hosts = [str(host) for host in event.get("hosts") or []]


def _job_left_queue(state: RunState, event: Event) -> None:
    state.queued.pop(str(event["job"]), None)


def _run_finished(state: RunState, event: Event) -> None:
    state.status, state.has_nodes = event.get("outcome", "finished"), False
    state.message = event.get("message", "")


def _train_stopped(state: RunState, event: Event) -> None:
    state.train_stopped = event.get("reason", "")


def _labelled(state: RunState, event: Event) -> None:
    labels.apply(state.labels, event)


def _archived(state: RunState, event: Event) -> None:
    state.archived = True


def _config_amended(state: RunState, event: Event) -> None:
    changes = {str(key): [old, new] for key, (old, new) in event["changes"].items()}
    number, at_step = int(event["number"]), event.get("at_step")
    by, why = str(event.get("by", "")), str(event.get("why", ""))
    newest = int(event.get("newest_step", 0))
    _append(state.amendments, AmendmentState(number, event["time_unix_s"], changes, by, why, at_step, newest))


def _amendment_applied(state: RunState, event: Event) -> None:
    if amendment := _numbered(state.amendments, event["number"]):
        amendment.applied_step = int(event["step"])


def _profile_requested(state: RunState, event: Event) -> None:
    number, steps, ranks = int(event["number"]), int(event["steps"]), [int(rank) for rank in event["ranks"]]
    by, memory = str(event.get("by", "")), bool(event.get("memory"))
    if state.open_profile:
        raise ValueError("another profile is being made")
    _append(state.profiles, ProfileState(number, event["attempt"], steps, ranks, memory, by))
    _fail_profile(state)  # the attempt can end between the look at it and the request


def _profiled(state: RunState, event: Event) -> None:
    if profile := _numbered(state.profiles, event["number"]):
        profile.status, profile.message = "done", ""
        profile.first_step, profile.last_step = int(event["first_step"]), int(event["step"])
        profile.bytes = int(event["bytes"])


def _profile_failed(state: RunState, event: Event) -> None:
    if profile := _numbered(state.profiles, event["number"]):
        profile.status, profile.message = "failed", str(event.get("message", ""))


def _gradient_spike(state: RunState, event: Event) -> None:
    insort(state.spikes, event, key=_step_of)


def _step_of(event: Event) -> int:
    return int(event.get("step", 0))


def _gradient_spike_ended(state: RunState, event: Event) -> None:
    if state.spikes and state.spikes[-1].get("step") == event["step"]:
        state.spikes[-1] = {**state.spikes[-1], "length_steps": int(event["length_steps"])}


def _warning(state: RunState, event: Event) -> None:
    state.warnings.append(str(event.get("message", "")))
    if event.get("damaged"):
        state.damages.append(state.warnings[-1])


def _alarm(state: RunState, event: Event) -> None:
    _warning(state, event)
    state.evaluation_behind |= event.get("what") == BEHIND


_HANDLERS = {
    "run_created": _run_created,
    "forecast_made": _forecast_made,
    "head_started": _head_started,
    "stage_started": _stage("running"),
    "stage_finished": _stage("finished"),
    "stage_skipped": _stage("skipped"),
    "stage_failed": _stage("failed"),
    "attempt_started": _attempt_started,
    "attempt_ended": _attempt_ended,
    "train_started": _train_started,
    "recovered": _recovered,
    "step": _step,
    "compile_cache": _compile_cache,
    "checkpoint_committed": _checkpoint_committed,
    "checkpoint_verified": _trusted("verified"),
    "checkpoint_survived": _trusted("survived"),
    "checkpoint_rejected": _checkpoint_gone,
    "checkpoint_deleted": _checkpoint_gone,
    "train_stopped": _train_stopped,
    "milestone": _milestone,
    "eval_taken": _eval_taken,
    "eval_started": _eval_started,
    "eval_task_started": _eval_task_started,
    "eval_progress": _eval_progress,
    "eval_task_finished": _eval_task_finished,
    "eval_finished": _eval_finished,
    "eval_failed": _eval_failed,
    "eval_stopped": _eval_stopped,
    "eval_rejected": _warning,
    "gradient_spike": _gradient_spike,
    "gradient_spike_ended": _gradient_spike_ended,
    "warning": _warning,
    "alarm": _alarm,
    "environment_collision": _warning,
    "tracking_lost": _warning,
    "job_queued": _job_queued,
    "job_started": _job_started,
    "job_left_queue": _job_left_queue,
    "labelled": _labelled,
    "archived": _archived,
    "config_amended": _config_amended,
    "amendment_applied": _amendment_applied,
    "profile_requested": _profile_requested,
    "profiled": _profiled,
    "profile_failed": _profile_failed,
    "hang": _hang,
    "node_notice": _node_notice,
    "straggler": _straggler,
    "corruption_checked": _corruption_checked,
    "corruption_suspected": _corruption_suspected,
    "nonfinite": _nonfinite,
    "stop_requested": stopping.fold_request,
    "run_finished": _run_finished,
}
