"""Computes a run's state from its events, with a handler for each kind of event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hlatctl.run import fold_evaluation, fold_queue, kept_fold, labels, stopping
from hlatctl.run.journal import TRAIN_WRITER, Event, JournalTail
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import DAMAGED
from hlatctl.run.state import (
    USED,
    AmendmentState,
    AttemptState,
    ContractScores,
    EvaluationProgress,
    MilestoneState,
    ProfileState,
    RunState,
    StageState,
)


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
    return kept_fold.follow(run, apply)


def apply(state: RunState, event: Event) -> None:
    """Apply one more event to a state. A damaged event adds a warning instead."""
    state.last_event_unix_s = max(state.last_event_unix_s, event["time_unix_s"])
    handler = _HANDLERS.get(event["kind"])
    if str(event.get("writer", "")).startswith(TRAIN_WRITER) and (attempt := _attempt_of(state, event)):
        attempt.train_events += 1
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


def _head_started(state: RunState, event: Event) -> None:
    # The run is driven again: an earlier outcome, or request to stop an earlier driver, no longer counts.
    state.status, state.message = "running", ""
    stopping.fold_start(state, event)
    fold_queue.only_training_waits(state)
    for milestone in state.milestones.values():  # the driver that took them has ended
        milestone.taken_unix_s = None


def _stage(status: str) -> Any:
    def handler(state: RunState, event: Event) -> None:
        name = event.get("stage", "")
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


def _attempt_started(state: RunState, event: Event) -> None:
    if state.attempts:
        state.attempts[-1].rejected_hosts = [str(host) for host in event.get("rejected_hosts") or []]
    state.attempts.append(
        AttemptState(
            event["attempt"],
            event.get("handle", {}),
            event["time_unix_s"],
            max_checkpoint_step=event.get("max_checkpoint_step"),
            config_number=event.get("config_number") or 0,
            oom_kills=event.get("oom_kills"),
            left_out_hosts=[str(host) for host in event.get("left_out_hosts") or []],
        )
    )
    state.train_stopped = ""
    _fail_profiles(state)


def _fail_profiles(state: RunState) -> None:
    """Fail the profiles that were asked of attempts that are over: nothing will make them."""
    for profile in state.profiles:
        later = (a for a in state.attempts if a.number >= profile.attempt)
        if profile.status == "asked" and any(a.number > profile.attempt or a.ended_unix_s is not None for a in later):
            profile.status, profile.message = "failed", f"attempt {profile.attempt} ended before"


def _attempt_of(state: RunState, event: Event) -> AttemptState | None:
    return next((a for a in reversed(state.attempts) if a.number == event["attempt"]), None)


def _attempt_ended(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.ended_unix_s = event["time_unix_s"]
        attempt.cause = event.get("cause", "")
        attempt.evidence = event.get("evidence", "")
        attempt.decision = event.get("decision", "")
        attempt.why = event.get("why", "")
        attempt.signature = event.get("signature", "")
        attempt.next_max_checkpoint_step = event.get("max_checkpoint_step")
        attempt.blamed_hosts = [str(host) for host in event.get("blamed_hosts") or []]
        fold_queue.training_left(state)
        _fail_profiles(state)


def _hang(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.hang = str(event["evidence"])


def _straggler(state: RunState, event: Event) -> None:
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.stragglers.append(event)
    _warning(state, event)


def _train_started(state: RunState, event: Event) -> None:
    resumed = int(event.get("resumed_from_step", 0))
    state.steps.supersede(after=resumed)
    state.spikes = [spike for spike in state.spikes if spike.get("step", 0) <= resumed]
    attempt = _attempt_of(state, event)
    if attempt:
        attempt.resumed_from_step = resumed
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
        state.checkpoints = sorted({*state.checkpoints, step})
        if not (degree == "verified" and state.trust.get(step) == "survived"):
            state.trust[step] = degree

    return handler


def _checkpoint_gone(state: RunState, event: Event) -> None:
    state.checkpoints = [step for step in state.checkpoints if step != event.get("step")]
    state.trust.pop(event.get("step", 0), None)


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
    milestone.judgements.pop("", None)  # replace an older evaluation without a contract
    milestone.judgements[scores.contract] = scores
    state.contract = state.contract or scores.contract
    # Scores under different contracts are never mixed. Show those under the run's first one.
    shown = milestone.judgements.get(state.contract, scores)
    milestone.scores, milestone.skipped, milestone.contract = shown.scores, shown.skipped, shown.contract
    fold_evaluation.finished(state, milestone, event)
    milestone.is_partial = bool(event.get("chosen")) and (milestone.is_partial or milestone.status != "evaluated")
    milestone.status, milestone.message, milestone.progress = "evaluated", "", None
    fold_evaluation.caught_up(state)


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


def _run_finished(state: RunState, event: Event) -> None:
    state.status = event.get("outcome", "finished")
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
    state.amendments.append(AmendmentState(number, event["time_unix_s"], changes, by, why, at_step, newest))


def _amendment_applied(state: RunState, event: Event) -> None:
    for amendment in state.amendments:
        if amendment.number == event["number"]:
            amendment.applied_step = int(event["step"])


def _profile_requested(state: RunState, event: Event) -> None:
    number, steps, ranks = int(event["number"]), int(event["steps"]), [int(rank) for rank in event["ranks"]]
    by, memory = str(event.get("by", "")), bool(event.get("memory"))
    state.profiles.append(ProfileState(number, event["attempt"], steps, ranks, memory, by))
    _fail_profiles(state)  # the attempt can end between the look at it and the request


def _profiled(state: RunState, event: Event) -> None:
    for profile in state.profiles:
        if profile.number == event["number"]:
            profile.status, profile.message = "done", ""
            profile.first_step, profile.last_step = int(event["first_step"]), int(event["step"])
            profile.bytes = int(event["bytes"])


def _profile_failed(state: RunState, event: Event) -> None:
    for profile in state.profiles:
        if profile.number == event["number"]:
            profile.status, profile.message = "failed", str(event.get("message", ""))


def _gradient_spike(state: RunState, event: Event) -> None:
    state.spikes.append(event)


def _gradient_spike_ended(state: RunState, event: Event) -> None:
    if state.spikes and state.spikes[-1].get("step") == event["step"]:
        state.spikes[-1] = {**state.spikes[-1], "length_steps": int(event["length_steps"])}


def _warning(state: RunState, event: Event) -> None:
    state.warnings.append(str(event.get("message", "")))


def _alarm(state: RunState, event: Event) -> None:
    _warning(state, event)
    fold_evaluation.alarm(state, event)


_HANDLERS = {
    "run_created": _run_created,
    "head_started": _head_started,
    "stage_started": _stage("running"),
    "stage_finished": _stage("finished"),
    "stage_skipped": _stage("skipped"),
    "stage_failed": _stage("failed"),
    "attempt_started": _attempt_started,
    "attempt_ended": _attempt_ended,
    "train_started": _train_started,
    "step": _step,
    "compile_cache": _compile_cache,
    "checkpoint_committed": _checkpoint_committed,
    "checkpoint_verified": _trusted("verified"),
    "checkpoint_survived": _trusted("survived"),
    "checkpoint_rejected": _checkpoint_gone,
    "checkpoint_deleted": _checkpoint_gone,
    "train_stopped": _train_stopped,
    "milestone": _milestone,
    "eval_taken": fold_evaluation.taken,
    "eval_started": _eval_started,
    "eval_task_started": _eval_task_started,
    "eval_progress": _eval_progress,
    "eval_task_finished": fold_evaluation.task_finished,
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
    "job_queued": fold_queue.job_queued,
    "job_started": fold_queue.job_started,
    "job_left_queue": fold_queue.job_left_queue,
    "labelled": _labelled,
    "archived": _archived,
    "config_amended": _config_amended,
    "amendment_applied": _amendment_applied,
    "profile_requested": _profile_requested,
    "profiled": _profiled,
    "profile_failed": _profile_failed,
    "hang": _hang,
    "straggler": _straggler,
    "stop_requested": stopping.fold_request,
    "run_finished": _run_finished,
}
