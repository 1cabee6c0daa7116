"""Train: run attempts until training is finished, a stop is requested, or the restart policy stops.

While an attempt runs, this stage reads its journal: it shows progress, announces milestones and hands them to the
evaluator, and ends an attempt that hangs. The job doesn't depend on it: the next driver re-attaches through the
journalled handle.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from conf.amendments import beginning_at, with_resume
from conf.data_changes import DATA_CHANGED, SKIP_STEPS, batch_after, skipped_batches
from conf.devices import DEVICES
from conf.schema import Config
from flows.launch.base import Handle, Job, Status
from flows.recovery import failure_causes, node_ledger, policy
from flows.runtime.amended import Orders, config_words, follow, note_begun, pause_step
from flows.runtime.context import FlowContext, make_job
from flows.runtime.jobs import JobWatch, ending_tail
from flows.stages.compile import cache_env, local_cache, warm_wrapper
from flows.stages.preflight import is_due, preflight
from hlatctl.run import fence
from hlatctl.run.checkpoint import MANIFEST, batches_drawn, events_about
from hlatctl.run.errors import (
    CancelledError,
    DamagedFileError,
    HlatctlError,
    StoppedError,
    StorageError,
    TrainingError,
    load_error,
)
from hlatctl.run.journal import heartbeat, train_writer
from hlatctl.run.paths import RunPaths, answered
from hlatctl.run.state import TRAIN_JOB, AttemptState

#: Called with the tokens of a milestone to evaluate.
OnMilestone = Callable[[int], None]

STOP_GRACE_S = 60.0
_POLL_S = 0.5
#: Time for stacks to reach the logs, and then for the evidence to reach its folder, before the processes are ended.
#: Nodes look for orders every second; a stopped process never answers.
_STACKS_S, _EVIDENCE_S = 2.0, 3.0


def next_attempt(ctx: FlowContext) -> int | None:
    """Return the number of the attempt to watch or to start; None: training is finished.

    A finished run that an amendment has made longer continues.
    """
    newest = ctx.refresh().attempt
    if newest is None:
        return 1
    if newest.ended_unix_s is None:
        return newest.number
    reached = max(newest.last_step, newest.resumed_from_step or 0)
    return None if newest.cause == "finished" and reached >= ctx.config.total_steps else newest.number + 1


def run_attempt(ctx: FlowContext, number: int, on_milestone: OnMilestone) -> policy.Decision:
    """Start an attempt or re-attach to it, wait for its end, and return what follows.

    Raises:
        StoppedError: a stop was requested, by an interrupt or by ``hlatctl stop``.
        TrainingError: the restart policy stopped the run.
        PreflightError: a suspect node failed its new measurement, and no other took its place in time.
        HlatctlError: the error that the trainer left for a person.
    """
    newest = ctx.state.attempt
    is_new = newest is None or newest.number != number
    if is_new:
        ctx.check_stop()
    ceiling = (newest.next_max_checkpoint_step if is_new else newest.max_checkpoint_step) if newest else None
    job = training_job(ctx.config, ctx.run, number, config_words=config_words(ctx), max_checkpoint_step=ceiling)
    job = _placed(ctx, job) if is_new else dataclasses.replace(job, excluded_hosts=ctx.place().left_out)
    rejected = _rejected_since(ctx, newest) if newest else []
    handle = _start(ctx, job, number, ceiling, rejected) if is_new else _attach(ctx, number)
    status = _watch(ctx, handle, on_milestone)
    # Kill leftovers so they cannot write during the next attempt.
    ctx.launcher.cancel(handle, grace_s=0)
    if ctx.world is None:  # a dry run has no processes
        with suppress(StorageError):  # a full disk; the start of the next attempt does it
            fence.close(ctx.run, number)
    return _conclude(ctx, job, status)


def training_job(
    config: Config,
    run: RunPaths,
    number: int,
    *,
    config_words: tuple[str, ...] = (),
    max_checkpoint_step: int | None = None,
) -> Job:
    """Return the job of one attempt, which loads no checkpoint after ``max_checkpoint_step``; pure.

    Args:
        config_words: words that name the configuration file; empty: ``config.yaml``.
    """
    env = _hang_variables(config, run.logs(number))
    env |= cache_env(config, local_cache(config)) if config.backend.compile else {}
    wrapper = warm_wrapper(config)
    ceiling = () if max_checkpoint_step is None else ("--max-checkpoint-step", str(max_checkpoint_step))
    words = config_words or ("--config", os.fspath(run.config))
    argv = ("-m", "trainer", "--run-dir", os.fspath(run.root), *words, "--attempt", str(number), *ceiling)
    return make_job(config, run, TRAIN_JOB, *argv, attempt=number, distributed=True, env=env, wrapper=wrapper)


def _hang_variables(config: Config, logs: Path) -> dict[str, str]:
    """Return the variables that make collectives leave evidence when they time out, except those that the user sets."""
    found = DEVICES[config.backend.device].hang_variables
    return {name: value.format(logs=logs) for name, value in found.items() if name not in config.backend.env}


def announce_milestones(ctx: FlowContext, on_milestone: OnMilestone) -> None:
    """Hand each milestone whose checkpoint is complete to the evaluator once."""
    for step, milestone_tokens in sorted(ctx.config.milestones.items()):
        if milestone_tokens in ctx.state.milestones:
            continue
        if (ctx.run.checkpoint(step) / MANIFEST).is_file():
            tokens = ctx.config.tokens_at(step)
            ctx.event("milestone", milestone_tokens=milestone_tokens, tokens=tokens, step=step)
            on_milestone(milestone_tokens)


def _placed(ctx: FlowContext, job: Job) -> Job:
    """Return the job with the hosts that it must or should not use; measure nodes first if that is due."""
    if ctx.state.attempt:
        _test_suspects(ctx, job, ctx.state.attempt)
    while is_due(ctx, placed := dataclasses.replace(job, excluded_hosts=ctx.place().left_out)):
        ctx.message("nodes: measuring the nodes that training gets")
        preflight(ctx)
    return dataclasses.replace(placed, avoided_hosts=tuple(sorted(_suspects(ctx))))


def _test_suspects(ctx: FlowContext, job: Job, newest: AttemptState) -> None:
    """Measure the nodes again if one of them is a suspect, or if an unknown one of several may have failed.

    A suspect that a kept spare node can replace is not measured.
    """
    suspects, left_out = _suspects(ctx), ctx.place().left_out
    kept = ctx.launcher.allocation(dataclasses.replace(job, excluded_hosts=left_out))
    if kept and kept.hosts:
        suspects &= set(kept.hosts)
        if len(set(kept.hosts).difference(suspects, left_out)) >= job.nodes:
            suspects = set()
    if suspects:
        ctx.message(f"nodes: {', '.join(sorted(suspects))} failed before; measuring again before the next attempt")
        preflight(ctx)
    elif job.nodes > 1 and newest.cause in failure_causes.NODE_CAUSES and not newest.blamed_hosts:
        ctx.message("nodes: one of them may have failed; measuring again before the next attempt")
        preflight(ctx)


def _suspects(ctx: FlowContext) -> set[str]:
    usable = set(ctx.hosts).difference(ctx.place().left_out)
    spare = len(ctx.hosts) > ctx.config.cluster.nodes
    return node_ledger.suspects(node_ledger.read(ctx.ledger), ctx.clock.now_unix_s(), replaceable=spare) & usable


def _rejected_since(ctx: FlowContext, newest: AttemptState) -> list[str]:
    usable = [host for host in ctx.hosts if host not in newest.left_out_hosts]
    used = newest.hosts or usable[: ctx.config.cluster.nodes]
    rejected = node_ledger.rejected_since(node_ledger.read(ctx.ledger), newest.ended_unix_s or 0.0)
    return sorted(rejected.intersection(used))


def _start(ctx: FlowContext, job: Job, number: int, ceiling: int | None, rejected: list[str]) -> Handle:
    plan = ctx.launcher.render(job)
    handle = ctx.launcher.handle(plan)
    # Journal the attempt before submitting it: if the driver dies in between, the next one finds the job lost.
    ctx.event(
        "attempt_started",
        attempt=number,
        handle=handle.to_json(),
        max_checkpoint_step=ceiling,
        config_number=ctx.config_number,
        oom_kills=ctx.launcher.oom_kills(),
        left_out_hosts=list(job.excluded_hosts),
        rejected_hosts=rejected,
    )
    ctx.require_journal()
    if ctx.world is None:
        ctx.when_there_is_room(lambda: fence.begin(ctx.run, number))
    Orders(ctx, ctx.state.attempts[-1]).give()  # before the first step: a short run reaches its milestone soon
    ctx.when_there_is_room(lambda: ctx.launcher.submit(plan))
    queued = ctx.launcher.status(handle).state == "queued"
    ctx.message(f"attempt {number}: {'submitted' if queued else 'started'}")
    return handle


def _attach(ctx: FlowContext, number: int) -> Handle:
    handle = Handle.from_json(ctx.state.attempts[-1].handle)
    ctx.event("attempt_attached", attempt=number)
    status = ctx.launcher.status(handle)
    if not status.ended:
        now = "still queued" if status.state == "queued" else "still running"
        ctx.message(f"attempt {number}: {now}, re-attached")
    return handle


def _watch(ctx: FlowContext, handle: Handle, on_milestone: OnMilestone) -> Status:
    stopping, silence, attempt = False, _Silence(ctx), ctx.state.attempts[-1]
    watch = JobWatch(ctx, handle.name, f"attempt {attempt.number}", started=bool(attempt.hosts))
    orders = Orders(ctx, attempt)
    while True:
        try:
            status = ctx.launcher.status(handle)
            watch.saw(status)
            state = ctx.watch()
            follow(ctx)
            orders.give()
            note_begun(ctx, attempt)
            announce_milestones(ctx, on_milestone)
            if status.ended:
                watch.ended()
                return status
            if state.stop_requested and not stopping:
                stopping = True
                ctx.message("stopping: the trainer finishes its step and writes a checkpoint")
                ctx.launcher.cancel(handle, grace_s=STOP_GRACE_S)
                continue
            silent_s = silence.length_s(state.attempts[-1], waits=watch.waits)
            hang = policy.hanging(state, silent_s, ctx.config.recovery)
            if hang and status.state == "running":
                _end_hung(ctx, handle, hang)
                continue
            ctx.clock.wait_for_event(_POLL_S, handle.name)
        except KeyboardInterrupt:
            ctx.signals.take()
            if stopping:
                ctx.message("stopping now")
                ctx.launcher.cancel(handle, grace_s=0)
                raise
            ctx.event("stop_requested", by="interrupt")


class _Silence:
    """Measures how long an attempt has shown no sign of life, by this process's clock: nodes' clocks may differ.

    Signs of life are events, and the modification time of their file: events can't be written on a full disk.
    """

    def __init__(self, ctx: FlowContext) -> None:
        self._run, self._clock = ctx.run, ctx.clock
        self._signs, self._since_s = (-1, 0), 0.0

    def length_s(self, attempt: AttemptState, *, waits: bool) -> float:
        """Return the seconds since the last sign of life, the end of a wait in the queue, or the first call."""
        now_s, signs = self._clock.monotonic_s(), (attempt.train_events, heartbeat(self._run, train_writer(0)))
        if waits or signs != self._signs:
            self._signs, self._since_s = signs, now_s
        return now_s - self._since_s


def _end_hung(ctx: FlowContext, handle: Handle, hang: str) -> None:
    stacks = ctx.launcher.dump_stacks(handle)
    # Journalled before the attempt is ended, so that the next driver knows the cause if this one dies now.
    folder = ctx.run.hang(ctx.state.attempts[-1].number)
    ctx.event("hang", evidence=hang, stacks=stacks, path=os.fspath(folder.relative_to(ctx.run.root)))
    ctx.message(f"hang: {hang}; {stacks}")
    ctx.clock.sleep(_STACKS_S)
    if ctx.world is None:
        _await_evidence(ctx, folder)
    ctx.launcher.cancel(handle, grace_s=0)


def _await_evidence(ctx: FlowContext, folder: Path) -> None:
    """Wait briefly until every process has left its stacks, and say how many have."""
    deadline_s, world = ctx.clock.monotonic_s() + _EVIDENCE_S, ctx.config.world_size
    while (left := answered(folder)) < world and ctx.clock.monotonic_s() < deadline_s:
        ctx.clock.sleep(_POLL_S)
    ctx.message(f"hang: {left} of {world} processes left their stacks in {folder}")


def _conclude(ctx: FlowContext, job: Job, status: Status) -> policy.Decision:
    state = ctx.refresh()
    attempt = state.attempts[-1]
    # Errors raised while the scheduler ends the job are not the cause.
    error = None if status.verdict else load_error(job.error_file)
    ending = _ending(ctx, job, status, error)
    decision = policy.decide(
        state,
        ending,
        ctx.config.recovery,
        batch=_failing_batch(ctx, attempt) if ending.cause == "data_error" else None,
        left_out=_newly_left_out(ctx, job, ending),
        several=ctx.config.cluster.nodes > 1,
    )
    ctx.event(
        "attempt_ended",
        attempt=attempt.number,
        cause=ending.cause,
        evidence=ending.evidence,
        signature=ending.signature,
        exit_code=ending.exit_code,
        step=attempt.last_step,
        decision=decision.action,
        why=decision.why,
        max_checkpoint_step=decision.max_checkpoint_step,
        hosts=list(status.hosts),
        blamed_hosts=list(ending.hosts),
    )
    if decision.action != "stop":
        ctx.require_journal()
    ctx.message(_sentence(attempt, ending, decision))
    if decision.skip_batch is not None:
        ctx.event(DATA_CHANGED, key=SKIP_STEPS, value=[decision.skip_batch], by="recovery", why=decision.why)
    if decision.action == "stop":
        raise error if error and not state.stop_requested else _stop(ctx, job, ending, decision)
    return decision


def _ending(ctx: FlowContext, job: Job, status: Status, error: HlatctlError | None) -> failure_causes.Ending:
    state, tail = ctx.state, ending_tail(job, status)
    ending = failure_causes.classify(
        status=status,
        attempt=state.attempts[-1],
        train_stopped=state.train_stopped,
        error=error,
        log_tail=tail,
        stop_requested=state.stop_requested,
        oom_kills=ctx.launcher.oom_kills(),
    )
    if ending.cause == "amended" and _paused(ctx):
        evidence = "ended to evaluate its milestone; checkpoint written"
        ending = dataclasses.replace(ending, cause="evaluation", evidence=evidence)
    used = [host for host in ctx.hosts if host not in job.excluded_hosts][: ctx.config.cluster.nodes]
    blamed = node_ledger.blamed_hosts(ending.cause, status, used, failure_causes.failed_host(tail))
    return dataclasses.replace(ending, hosts=blamed)


def _paused(ctx: FlowContext) -> bool:
    """Return whether the newest attempt has ended at a milestone, and the next one begins with the same amendments."""
    step, attempt = pause_step(ctx), ctx.state.attempts[-1]
    begins_with = beginning_at(ctx.state.amendments, attempt.last_step)
    return step is not None and attempt.last_step >= step and begins_with <= attempt.config_number


def _stop(ctx: FlowContext, job: Job, ending: failure_causes.Ending, decision: policy.Decision) -> HlatctlError:
    run_id = ctx.run.run_id
    resume = f"`hlatctl resume {run_id}`"
    if ctx.state.stop_requested:
        return StoppedError(f"run {run_id}: {decision.why}", hint=f"{resume} continues the run")
    if ending.cause == "cancelled":
        why = f"run {run_id}: {ending.evidence}; {decision.why}"
        return CancelledError(why, hint=f"{decision.hint}; {resume} continues the run")
    hint = with_resume(decision.hint.replace(" RUN ", f" {run_id} ") or f"see {job.log}", run_id)
    why = f"training stopped at step {ctx.state.step}: {ending.evidence}; {decision.why}"
    return TrainingError(why, hint=hint if resume[:-1] in hint else f"{hint}; then {resume}")


def _newly_left_out(ctx: FlowContext, job: Job, ending: failure_causes.Ending) -> tuple[str, ...]:
    """Add the attempt's failure and slow nodes to the ledger; return the hosts that it newly leaves out."""
    attempt = ctx.state.attempts[-1]
    for straggler in attempt.stragglers:
        ctx.hold_against([straggler["host"]], "straggler", straggler["message"], attempt=attempt.number)
    if ending.hosts:
        ctx.hold_against(ending.hosts, "failure", ending.signature, attempt=attempt.number)
    return tuple(host for host in ctx.place().left_out if host not in job.excluded_hosts)


def _failing_batch(ctx: FlowContext, attempt: AttemptState) -> int | None:
    """Return the batch that the attempt's failing step trains on, counted from the newest checkpoint before it."""
    step = policy.failing_step(attempt)
    newest = max((s for s in ctx.state.checkpoints if s < step), default=0)
    events = events_about(ctx.run, newest)
    try:
        drawn = 0 if ctx.config.begins_data_at(newest) else batches_drawn(ctx.run, newest, events)
    except DamagedFileError:
        return None
    return batch_after(drawn, step - newest, skipped_batches(ctx.config, events))


def _sentence(attempt: AttemptState, ending: failure_causes.Ending, decision: policy.Decision) -> str:
    if ending.cause == "finished":
        return f"attempt {attempt.number}: finished at step {attempt.last_step}"
    wait = f" in {decision.wait_s:g} s" if decision.wait_s else ""
    return f"attempt {attempt.number}: ended at step {attempt.last_step} ({ending.evidence}); {decision.why}{wait}"
