"""An attempt of training: start it or find it again, watch it to its end, and decide what follows.

While an attempt runs, its driver reads the run's journal: it shows progress, announces milestones and hands them to the
evaluator, and ends an attempt that hangs. The job doesn't depend on it: the next driver re-attaches through the
journalled handle.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from conf.amendments import beginning_at, with_resume
from conf.data_changes import DATA_CHANGED, SKIP_STEPS, batch_after, skipped_batches
from conf.devices import DEVICES
from conf.schema import Config
from flows.launch import endings
from flows.launch.base import Handle, Job, Status
from flows.recovery import failure_causes, phases, policy
from flows.recovery.failure_causes import NODE_CAUSES
from flows.recovery.node_ledger import KIND_OF_CAUSE, Nodes
from flows.runtime import spending
from flows.runtime.amended import Orders, config_words, follow, note_begun, pause_step
from flows.runtime.context import FlowContext, make_job
from flows.runtime.driver import Clock
from flows.runtime.jobs import JobWatch, ending_of, where_else
from flows.stages.compile import cache_env, local_cache, warm_wrapper
from flows.stages.preflight import hands_over, is_due, preflight
from hlatctl import notices
from hlatctl.run import fence
from hlatctl.run.checkpoint import MANIFEST, batches_drawn, events_about
from hlatctl.run.errors import (
    BudgetError,
    CancelledError,
    DamagedFileError,
    HlatctlError,
    StoppedError,
    StorageError,
    TrainingError,
    load_error,
)
from hlatctl.run.events import recovery_text
from hlatctl.run.journal import heartbeat, train_writer
from hlatctl.run.paths import RunPaths, answered, stacks_name
from hlatctl.run.state import TRAIN_JOB, AttemptState, RunState
from hlatctl.run.stopping import BUDGET
from hlatctl.units import duration, host_names

#: Called with the tokens of a milestone to evaluate.
OnMilestone = Callable[[int], None]

STOP_GRACE_S = 60.0
_POLL_S = 0.5
#: The most that counts as silence between two looks, which are half a second apart.
_LATE_LOOK_S = 10.0
#: Time for stacks to reach the logs, and then for the evidence to reach its folder, before the processes are ended.
#: Nodes look for orders every second; a stopped process never answers.
_STACKS_S, _EVIDENCE_S = 2.0, 3.0


def next_attempt(state: RunState, config: Config) -> int | None:
    """Return the number of the attempt to watch or to start; None: training is finished.

    A finished run that an amendment has made longer continues.
    """
    newest = state.attempt
    if newest is None:
        return 1
    if newest.ended_unix_s is None:
        return newest.number
    reached = max(newest.last_step, newest.resumed_from_step or 0)
    return None if newest.cause == "finished" and reached >= config.total_steps else newest.number + 1


def run_attempt(ctx: FlowContext, number: int, on_milestone: OnMilestone) -> policy.Decision:
    """Start an attempt or re-attach to it, wait for its end, and return what follows.

    Raises:
        StoppedError: a stop was requested, by an interrupt or by ``hlatctl stop``.
        TrainingError: the restart policy stopped the run.
        PreflightError: a suspect node failed its new measurement, and no other took its place in time.
        HlatctlError: the error that the trainer left for a person.
    """
    newest = ctx.state.attempt
    attempt = Attempt.attach(ctx, newest) if newest and newest.number == number else Attempt.start(ctx, number)
    return attempt.conclude(attempt.watch(on_milestone))


class Attempt:
    """The newest attempt of a run, which is in the journal; made by :meth:`start` or :meth:`attach`."""

    def __init__(self, ctx: FlowContext, job: Job, handle: Handle) -> None:
        self._ctx, self._job, self._handle = ctx, job, handle
        self._notices = notices.Reader(endings.base_of(handle))
        self._orders = Orders(ctx.run, ctx.state.attempts[-1], ctx.clock)
        self._rank_clock, self._seen_unix_s = phases.RankClock(ctx.state.attempts[-1].newest_train_unix_s), 0.0

    @classmethod
    def start(cls, ctx: FlowContext, number: int) -> Attempt:
        """Choose the nodes of a new attempt, journal it, and submit its job."""
        ctx.check_stop()
        newest = ctx.state.attempt
        if newest:
            _await_leaving(ctx, newest)
        ceiling = newest.next_max_checkpoint_step if newest else None
        job = training_job(ctx.config, ctx.run, number, config_words=config_words(ctx), max_checkpoint_step=ceiling)
        job = _placed(ctx, job, newest)
        if not hands_over(ctx):
            job = dataclasses.replace(job, stays="")
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
            rejected_hosts=ctx.nodes.rejected_since(newest) if newest else [],
        )
        ctx.require_journal()
        if ctx.simulation is None:
            ctx.when_there_is_room(lambda: fence.begin(ctx.run, number))
        attempt = cls(ctx, job, handle)
        attempt._give_orders()  # before the first step: a short run reaches its milestone soon
        ctx.when_there_is_room(lambda: ctx.launcher.submit(plan))
        queued = ctx.launcher.status(handle).state == "queued"
        ctx.message(f"attempt {number}: {'submitted' if queued else 'started'}")
        return attempt

    @classmethod
    def attach(cls, ctx: FlowContext, newest: AttemptState) -> Attempt:
        """Return the attempt that an earlier driver has journalled, whether or not its job is still running."""
        number, ceiling = newest.number, newest.max_checkpoint_step
        job = training_job(ctx.config, ctx.run, number, config_words=config_words(ctx), max_checkpoint_step=ceiling)
        job = dataclasses.replace(job, excluded_hosts=ctx.nodes.place().left_out)
        handle = Handle.from_json(newest.handle)
        ctx.event("attempt_attached", attempt=number)
        status = ctx.launcher.status(handle)
        if not status.ended:
            now = "still queued" if status.state == "queued" else "still running"
            ctx.message(f"attempt {number}: {now}, re-attached")
        return cls(ctx, job, handle)

    def watch(self, on_milestone: OnMilestone) -> Status:
        """Follow the attempt until all its processes have ended, and return how its job ended."""
        ctx, handle, attempt = self._ctx, self._handle, self._ctx.state.attempts[-1]
        stopping, silence = False, _Silence(ctx.run, ctx.clock)
        watch = JobWatch(ctx, handle.name, f"attempt {attempt.number}", started=bool(attempt.hosts))
        while True:
            try:
                status, now_unix_s = ctx.launcher.status(handle), ctx.clock.now_unix_s()
                watch.saw(status)
                self._take_notice()
                state = ctx.watch()
                self._note_recovery()
                follow(ctx)
                self._give_orders()
                note_begun(ctx, attempt)
                announce_milestones(ctx, on_milestone)
                if status.ended:
                    self._seen_unix_s = now_unix_s
                    watch.ended()
                    break
                if state.stop_requested and not stopping:
                    stopping = True
                    ctx.message("stopping: the trainer finishes its step and writes a checkpoint")
                    ctx.launcher.cancel(handle, grace_s=STOP_GRACE_S)
                    continue
                if not stopping:
                    ctx.check_budget()
                silent_s = silence.length_s(state.attempts[-1], waits=watch.waits)
                hang = policy.hanging(state, silent_s, ctx.config.recovery)
                if hang and status.state == "running":
                    self._end_hung(hang)
                    continue
                ctx.clock.wait_for_event(_POLL_S, handle.name, lambda: ctx.launcher.has_ended(handle))
            except BudgetError as error:
                ctx.message(error.message)
                ctx.event("stop_requested", by=BUDGET)
            except KeyboardInterrupt:
                ctx.signals.take()
                if stopping:
                    ctx.message("stopping now")
                    ctx.launcher.cancel(handle, grace_s=0)
                    raise
                ctx.event("stop_requested", by="interrupt")
        # Kill leftovers so they cannot write during the next attempt.
        ctx.launcher.cancel(handle, grace_s=0)
        if ctx.simulation is None:  # a dry run has no processes
            with suppress(StorageError):  # a full disk; the start of the next attempt does it
                fence.close(ctx.run, attempt.number)
        return status

    def _take_notice(self) -> None:
        """Journal new notices: one event and one write to the ledger for all nodes with notices of a kind."""
        ctx, attempt = self._ctx, self._ctx.state.attempts[-1]
        found: dict[str, dict[str, notices.Notice]] = {}
        for notice in self._notices.new():
            # Otherwise an earlier driver has journalled it.
            if notice.host not in attempt.noticed_hosts.get(notice.what, ()):
                found.setdefault(notice.what, {})[notice.host] = notice
        for what, by_host in found.items():
            first, *others = by_host.values()
            message = first.message
            if others:
                message = f"{message}; the same for {host_names([other.host for other in others])}"
            ends = [one.ends_unix_s for one in by_host.values() if one.ends_unix_s is not None]
            hosts, ends_unix_s = list(by_host), max(ends, default=None)
            ctx.event("node_notice", what=what, hosts=hosts, ends_unix_s=ends_unix_s, message=message)
            ctx.message(message)
            if ends:
                ctx.hold_against(hosts, "leaving", message, attempt=attempt.number)

    def _note_recovery(self) -> None:
        """Journal the phases of a recovery once the attempt has made its first step."""
        ctx, attempts = self._ctx, self._ctx.state.attempts
        newest = attempts[-1]
        self._rank_clock.read(newest.newest_train_unix_s, ctx.clock.now_unix_s())
        found = phases.recovery(attempts, self._rank_clock)
        if found is not None:
            cause, seconds = found
            step, warm = (newest.resumed_from_step or 0) + 1, bool(newest.starting.get("warm"))
            source = newest.starting.get("restored_from")
            event: dict[str, Any] = {"cause": cause, "warm": warm, "restored_from": source, "step": step, **seconds}
            ctx.event("recovered", **event)
            ctx.message(f"attempt {newest.number}: {recovery_text(event)}")

    def _give_orders(self) -> None:
        if self._ctx.simulation is None:
            self._orders.give(self._ctx.state, self._ctx.config)

    def _end_hung(self, hang: str) -> None:
        ctx = self._ctx
        stacks = ctx.launcher.dump_stacks(self._handle)
        # Journalled before the attempt is ended, so that the next driver knows the cause if this one dies now.
        folder = ctx.run.hang(ctx.state.attempts[-1].number)
        ctx.event("hang", evidence=hang, stacks=stacks, path=os.fspath(folder.relative_to(ctx.run.root)))
        ctx.message(f"hang: {hang}; {stacks}")
        if ctx.simulation is None:  # processes of a dry run leave nothing; it has a time for all of this
            ctx.clock.sleep(_STACKS_S)
            left = _await_evidence(folder, ctx.config.world_size, ctx.clock)
            ctx.message(f"hang: {left} of {ctx.config.world_size} processes left their stacks in {folder}")
        ctx.launcher.cancel(self._handle, grace_s=0)

    def conclude(self, status: Status) -> policy.Decision:
        """Find the cause of the end, journal it with what follows, and return that; raise an error if the run stops."""
        ctx, job = self._ctx, self._job
        self._take_notice()
        state = ctx.refresh()
        attempt = state.attempts[-1]
        # Errors raised while the scheduler ends the job are not the cause.
        error = None if status.verdict else load_error(job.error_file)
        ending = ending_of_attempt(
            job, status, error, state, ctx.config, nodes=ctx.nodes, oom_kills=ctx.launcher.oom_kills()
        )
        self._hold_nodes_against(attempt, ending)
        last_unix_s = self._rank_clock.here(attempt.newest_train_unix_s)
        decision = policy.decide(
            state,
            ending,
            ctx.config.recovery,
            batch=_failing_batch(ctx.run, ctx.config, state) if ending.cause == "data_error" else None,
            left_out=tuple(host for host in ctx.nodes.place().left_out if host not in job.excluded_hosts),
            several=ctx.config.cluster.nodes > 1,
            here=ctx.config.cluster.jobs_run == "here",
            in_memory=ctx.config.checkpoint.memory_every_steps is not None,
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
            detect_s=None if last_unix_s is None else max(0.0, self._seen_unix_s - last_unix_s),
            decide_s=max(0.0, ctx.clock.now_unix_s() - self._seen_unix_s),
        )
        if decision.action != "stop":
            ctx.require_journal()
        ctx.message(_sentence(attempt, ending, decision))
        if decision.skip_batch is not None:
            ctx.event(DATA_CHANGED, key=SKIP_STEPS, value=[decision.skip_batch], by="recovery", why=decision.why)
        if decision.action == "stop":
            over = spending.used_up(ctx.run.run_id, state, ctx.config) if state.stop_by == BUDGET else None
            raise over or (error if error and not state.stop_requested else _stop(state, job, ending, decision))
        return decision

    def _hold_nodes_against(self, attempt: AttemptState, ending: failure_causes.Ending) -> None:
        """Add the attempt's failure and its slow nodes to the node ledger."""
        for straggler in attempt.stragglers:
            self._ctx.hold_against([straggler["host"]], "straggler", straggler["message"], attempt=attempt.number)
        if ending.hosts:
            kind = KIND_OF_CAUSE.get(ending.cause, "failure")
            self._ctx.hold_against(ending.hosts, kind, ending.signature, attempt=attempt.number)


def ending_of_attempt(
    job: Job,
    status: Status,
    error: HlatctlError | None,
    state: RunState,
    config: Config,
    *,
    nodes: Nodes,
    oom_kills: int | None,
) -> failure_causes.Ending:
    """Return how the newest attempt ended, with the hosts to blame, from all that it left."""
    status, tail = ending_of(job, status)
    attempt = state.attempts[-1]
    ending = failure_causes.classify(
        status=status,
        attempt=attempt,
        train_stopped=state.train_stopped,
        error=error,
        log_tail=tail,
        stop_requested=state.stop_requested,
        oom_kills=oom_kills,
    )
    if ending.cause == "amended" and (stage := _ended_stage(state, config)):
        ending = dataclasses.replace(ending, cause="stage", evidence=f"stage {stage} is trained; checkpoint written")
    elif ending.cause == "amended" and _is_at_milestone(state, config):
        evidence = "ended to evaluate its milestone; checkpoint written"
        ending = dataclasses.replace(ending, cause="evaluation", evidence=evidence)
    if ending.cause == "stopped" and state.stop_by == BUDGET:
        evidence = "its budget was used up; checkpoint written"
        ending = dataclasses.replace(ending, cause="budget", evidence=evidence)
    if ending.cause in _FOUND_BY_RANKS:  # the processes have compared each other
        return dataclasses.replace(ending, hosts=tuple(attempt.corrupt_hosts))
    naming, hung = list[str](), list[str]()
    if len(status.hosts) > 1 and ending.cause in NODE_CAUSES:
        naming = where_else(job, status.hosts, ending.cause)
        hung = _hung_hosts(RunPaths(job.run_dir), attempt, status.hosts, config) if ending.cause == "hang" else []
    return nodes.blame(ending, status, job, tail, naming=naming, hung=hung)


#: Causes for which the ranks themselves name the node.
_FOUND_BY_RANKS = ("corruption", "nonfinite_weights")


def _hung_hosts(run: RunPaths, attempt: AttemptState, hosts: Sequence[str], config: Config) -> list[str]:
    """Return the hosts of the ranks for which the others waited, as their stacks show. Reads one file per rank."""
    stacks = {}
    for rank in range(config.world_size):
        with suppress(OSError):
            stacks[rank] = (run.hang(attempt.number) / stacks_name(rank)).read_text(encoding="utf-8", errors="replace")
    ranks, per_node = failure_causes.hung_ranks(stacks, config.world_size), config.cluster.processes_per_node
    return [hosts[rank // per_node] for rank in ranks if rank // per_node < len(hosts)]


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
    env = _hang_variables(config, run.logs(number)) | _notice_variables(config)
    env |= cache_env(config, local_cache(config)) if config.backend.compile else {}
    wrapper = warm_wrapper(config)
    ceiling = () if max_checkpoint_step is None else ("--max-checkpoint-step", str(max_checkpoint_step))
    words = config_words or ("--config", os.fspath(run.config))
    argv = ("-m", "trainer", "--run-dir", os.fspath(run.root), *words, "--attempt", str(number), *ceiling)
    job = make_job(config, run, TRAIN_JOB, *argv, attempt=number, distributed=True, env=env, wrapper=wrapper)
    return dataclasses.replace(job, stays="failed" if job.shared_modules and not wrapper else "")


def _hang_variables(config: Config, logs: Path) -> dict[str, str]:
    """Return the variables that make collectives leave evidence when they time out, except those that the user sets."""
    found = DEVICES[config.backend.device].hang_variables
    return {name: value.format(logs=logs) for name, value in found.items() if name not in config.backend.env}


def _notice_variables(config: Config) -> dict[str, str]:
    """Return the variables that make the nodes look for notices (``hlatctl.notices``)."""
    ends, url = config.cluster.capacity_ends_unix_s, config.cluster.metadata_url
    wanted = {notices.METADATA_ENV: url, notices.CAPACITY_ENDS_ENV: None if ends is None else f"{ends:.0f}"}
    return {name: value for name, value in wanted.items() if value}


def announce_milestones(ctx: FlowContext, on_milestone: OnMilestone) -> None:
    """Hand each milestone whose checkpoint is complete to the evaluator once."""
    for step, milestone_tokens in sorted(ctx.config.milestones.items()):
        if milestone_tokens in ctx.state.milestones:
            continue
        if (ctx.run.checkpoint(step) / MANIFEST).is_file():
            tokens = ctx.config.tokens_at(step)
            ctx.event("milestone", milestone_tokens=milestone_tokens, tokens=tokens, step=step)
            on_milestone(milestone_tokens)


def _await_leaving(ctx: FlowContext, ended: AttemptState) -> None:
    """Wait until nodes that are being taken back are gone, unless other nodes replace them."""
    staying = set(ended.leaving_hosts).intersection(ctx.nodes.hosts).difference(ctx.nodes.place().left_out)
    wait_s = ended.leaves_unix_s - ctx.clock.now_unix_s()
    if staying and wait_s > 0:
        ctx.launcher.release(ctx.run.root)
        ctx.message(f"nodes: waiting {duration(wait_s)} until {host_names(sorted(staying))} is taken back")
        ctx.pause(wait_s)


def _placed(ctx: FlowContext, job: Job, ended: AttemptState | None) -> Job:
    """Return the job with the hosts that it must or should not use; measure nodes first if that is due."""
    if ended and (why := ctx.nodes.why_measure(job, ended)):
        ctx.message(f"nodes: {why}; measuring again before the next attempt")
        preflight(ctx)
    while is_due(ctx, placed := dataclasses.replace(job, excluded_hosts=ctx.nodes.place().left_out)):
        ctx.message("nodes: measuring the nodes that training gets")
        preflight(ctx)
    return dataclasses.replace(placed, avoided_hosts=tuple(sorted(ctx.nodes.suspects())))


class _Silence:
    """Measures how long an attempt has shown no sign of life, by this process's clock: nodes' clocks may differ.

    Signs of life are events, and the modification time of their file: events can't be written on a full disk. If this
    process was held up, by storage that training waits for too or by a suspended machine, that is no silence.
    """

    def __init__(self, run: RunPaths, clock: Clock) -> None:
        self._run, self._clock = run, clock
        self._signs, self._silent_s, self._looked_s = (-1, 0), 0.0, clock.monotonic_s()

    def length_s(self, attempt: AttemptState, *, waits: bool) -> float:
        """Return the seconds since the last sign of life, the end of a wait in the queue, or the first call."""
        now_s, signs = self._clock.monotonic_s(), (attempt.train_events, heartbeat(self._run, train_writer(0)))
        self._silent_s += min(now_s - self._looked_s, _LATE_LOOK_S)
        self._looked_s = now_s
        if waits or signs != self._signs:
            self._signs, self._silent_s = signs, 0.0
        return self._silent_s


def _await_evidence(folder: Path, processes: int, clock: Clock) -> int:
    """Wait briefly until every process has left its stacks, and return how many have."""
    deadline_s = clock.monotonic_s() + _EVIDENCE_S
    while (left := answered(folder)) < processes and clock.monotonic_s() < deadline_s:
        clock.sleep(_POLL_S)
    return left


def _ended_stage(state: RunState, config: Config) -> str:
    """Return the name of the stage that the newest attempt has trained to its end; empty: none."""
    step = state.attempts[-1].last_step
    stage = config.stage_at(step) if config.ends_stage(step) else None
    return stage.name if stage else ""


def _is_at_milestone(state: RunState, config: Config) -> bool:
    """Return whether the newest attempt has ended at a milestone, and the next one begins with the same amendments."""
    step, attempt = pause_step(state, config), state.attempts[-1]
    begins_with = beginning_at(state.amendments, attempt.last_step)
    return step is not None and attempt.last_step >= step and begins_with <= attempt.config_number


def _stop(state: RunState, job: Job, ending: failure_causes.Ending, decision: policy.Decision) -> HlatctlError:
    run_id = job.run_dir.name
    resume = f"`hlatctl resume {run_id}`"
    if state.stop_requested:
        return StoppedError(f"run {run_id}: {decision.why}", hint=f"{resume} continues the run")
    if ending.cause == "reclaimed":
        return StoppedError(f"run {run_id}: {ending.evidence}; {decision.why}", hint=f"{resume}: {decision.hint}")
    if ending.cause == "cancelled":
        why = f"run {run_id}: {ending.evidence}; {decision.why}"
        return CancelledError(why, hint=f"{decision.hint}; {resume} continues the run")
    hint = with_resume(decision.hint.replace(" RUN ", f" {run_id} ") or f"see {job.log}", run_id)
    why = f"training stopped at step {state.step}: {ending.evidence}; {decision.why}"
    return TrainingError(why, hint=hint if resume[:-1] in hint else f"{hint}; then {resume}")


def _failing_batch(run: RunPaths, config: Config, state: RunState) -> int | None:
    """Return the batch of the newest attempt's failing step, counted from the newest checkpoint before it."""
    step = policy.failing_step(state.attempts[-1])
    newest = max((s for s in state.checkpoints if s < step), default=0)
    events = events_about(run, newest)
    try:
        drawn = 0 if config.begins_data_at(newest) else batches_drawn(run, newest, events)
    except DamagedFileError:
        return None
    return batch_after(drawn, step - newest, skipped_batches(config, events))


def _sentence(attempt: AttemptState, ending: failure_causes.Ending, decision: policy.Decision) -> str:
    if ending.cause == "finished":
        return f"attempt {attempt.number}: finished at step {attempt.last_step}"
    wait = f" in {decision.wait_s:g} s" if decision.wait_s else ""
    return f"attempt {attempt.number}: ended at step {attempt.last_step} ({ending.evidence}); {decision.why}{wait}"
