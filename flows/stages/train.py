"""Train: attempts, one after another, until the last step is done, somebody asks to stop, or recovery gives up.

While an attempt runs, this stage watches its journal: it shows progress, announces milestones and hands them to the
evaluator. The job does not depend on it: a head that dies re-attaches through the journalled handle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from conf.schema import Config
from flows import recovery
from flows.context import FlowContext, make_job
from flows.jobs import log_tail
from flows.launch.base import Handle, Job, Status
from flows.stages.compile import cache_env, local_cache
from hlatctl.run.errors import StoppedError, TrainingError, load_error
from hlatctl.run.manifest import MANIFEST
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import AttemptState

#: A milestone to evaluate: its tokens.
OnMilestone = Callable[[int], None]

STOP_GRACE_S = 60.0
_POLL_S = 0.5


def next_attempt(ctx: FlowContext) -> int | None:
    """The number of the attempt to watch or to start, or None if training is done."""
    newest = ctx.refresh().attempt
    if newest is None:
        return 1
    if newest.ended_unix_s is None:
        return newest.number
    return None if newest.cause == "finished" else newest.number + 1


def run_attempt(ctx: FlowContext, number: int, on_milestone: OnMilestone) -> recovery.Decision:
    """Start an attempt, or re-attach to it, and see it to its end.

    Raises:
        StoppedError: somebody asked to stop, here by an interrupt or elsewhere by ``hlatctl stop``.
        TrainingError: the restart policy gave up.
        HlatctlError: the error that the trainer left for a person.
    """
    job = training_job(ctx.config, ctx.run, number)
    handle = _attach(ctx, job, number)
    status = _watch(ctx, handle, on_milestone)
    # Whatever is left of it must not write beside its successor.
    ctx.launcher.cancel(handle, grace_s=0)
    return _conclude(ctx, job, status)


def training_job(config: Config, run: RunPaths, number: int) -> Job:
    """The job of one training attempt; pure."""
    env = cache_env(local_cache(config)) if config.backend.compile else {}
    return make_job(
        config, run, "train", "-m", "trainer", "--run-dir", os.fspath(run.root), "--attempt", str(number),
        attempt=number, distributed=True, env=env,
    )  # fmt: skip


def announce_milestones(ctx: FlowContext, on_milestone: OnMilestone) -> None:
    """Hand every milestone whose checkpoint is complete to the evaluator, once."""
    for step, milestone_tokens in sorted(ctx.config.milestones.items()):
        if milestone_tokens in ctx.state.milestones:
            continue
        if (ctx.run.checkpoint(step) / MANIFEST).is_file():
            tokens = step * ctx.config.tokens_per_step
            ctx.event("milestone", milestone_tokens=milestone_tokens, tokens=tokens, step=step)
            on_milestone(milestone_tokens)


def _attach(ctx: FlowContext, job: Job, number: int) -> Handle:
    newest = ctx.state.attempt
    if newest and newest.number == number:
        handle = Handle.from_json(newest.handle)
        if not ctx.launcher.status(handle).ended:
            ctx.message(f"attempt {number}: still running, re-attached")
        return handle
    plan = ctx.launcher.render(job)
    handle = ctx.launcher.handle(plan)
    # First the journal, then the job: a head that dies in between finds a handle that says "lost" and starts the next.
    ctx.event("attempt_started", attempt=number, handle=handle.to_json())
    ctx.launcher.submit(plan)
    ctx.message(f"attempt {number}: started")
    return handle


def _watch(ctx: FlowContext, handle: Handle, on_milestone: OnMilestone) -> Status:
    stopping = False
    while True:
        try:
            status = ctx.launcher.status(handle)
            state = ctx.watch()
            announce_milestones(ctx, on_milestone)
            if status.ended:
                return status
            if state.stop_requested and not stopping:
                stopping = True
                ctx.message("stopping: the trainer finishes its step and writes a checkpoint")
                ctx.launcher.cancel(handle, grace_s=STOP_GRACE_S)
                continue
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            if stopping:
                ctx.message("stopping now")
                ctx.launcher.cancel(handle, grace_s=0)
                raise
            ctx.event("stop_requested", by="interrupt")


def _conclude(ctx: FlowContext, job: Job, status: Status) -> recovery.Decision:
    state = ctx.refresh()
    attempt = state.attempts[-1]
    error = load_error(job.error_file)
    ending = recovery.classify(
        status=status, train_stopped=state.train_stopped, error=error, log_tail=log_tail(job.log)
    )
    decision = recovery.decide(state, ending, ctx.config.recovery)
    ctx.event(
        "attempt_ended", attempt=attempt.number, cause=ending.cause, evidence=ending.evidence,
        exit_code=ending.exit_code, step=attempt.last_step, decision=decision.action, why=decision.why,
    )  # fmt: skip
    ctx.message(_sentence(attempt, ending, decision))
    if decision.action != "stop":
        return decision
    if state.stop_requested:
        raise StoppedError(f"run {ctx.run.run_id}: {decision.why}", hint=f"hlatctl resume {ctx.run.run_id}")
    if error:
        raise error
    raise TrainingError(
        f"training stopped at step {state.step}: {ending.evidence}; {decision.why}",
        hint=f"see {job.log}; then `hlatctl resume {ctx.run.run_id}`",
    )


def _sentence(attempt: AttemptState, ending: recovery.Ending, decision: recovery.Decision) -> str:
    if ending.cause == "finished":
        return f"attempt {attempt.number}: finished at step {attempt.last_step}"
    wait = f" in {decision.wait_s:g} s" if decision.wait_s else ""
    return f"attempt {attempt.number}: ended at step {attempt.last_step} ({ending.evidence}); {decision.why}{wait}"
