"""The training flow: creates a run and drives it to its end.

``pipeline`` has the stages in order. It never waits for Prefect, which needs some ten seconds to start:
``flows.tracking.prefect_flow`` calls the stages and reports them from a thread of its own.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import conf.load
from conf import fingerprint, simulation, tracking
from conf.origins import Origins
from conf.schema import Config, SimulationConfig
from flows.launch.base import launcher_for
from flows.runtime import amended, spending
from flows.runtime.context import FlowContext, is_simulated, open_context, refuse_archived
from flows.runtime.driver import Clock, Observer
from flows.simulation.cluster import START_UNIX_S, DriverLostError
from flows.stages import finish_report, record_provenance, write_report
from flows.stages.attempt import announce_milestones, next_attempt, run_attempt
from flows.stages.compile import check_coverage, compile_graphs, warm_cache
from flows.stages.data import prepare_data
from flows.stages.evaluate import Evaluations, due_milestones, remove_left_over
from flows.stages.preflight import preflight
from flows.stages.validate import check_new, check_notify, check_remote, check_shape, validate
from flows.tracking import follower, links, prefect_api, prefect_flow, prefect_stale
from hlatctl.run import files, runs
from hlatctl.run.checkpoint import MANIFEST, read_manifest
from hlatctl.run.errors import (
    CheckpointError,
    ConfigError,
    EvaluationError,
    HlatctlError,
    StoppedAtOnceError,
    StoppedError,
    cannot_write,
    storage_errors,
)
from hlatctl.run.journal import FLOW_WRITER, JournalWriter
from hlatctl.run.lease import driver_token, hold_driver
from hlatctl.run.paths import RunPaths
from hlatctl.run.redact import hide
from hlatctl.run.state import RunState
from hlatctl.units import duration


class Caller(Protocol):
    """How the pipeline calls its stages."""

    def call(self, name: str, stage: Callable[[], Any]) -> Any:
        """Run a stage and return its result."""

    def submit(self, choose: Callable[[], tuple[str, Callable[[], Any]]], *, most: int) -> Future[Any]:
        """Run the stage that ``choose`` names, once one of ``most`` threads alongside the pipeline is free."""


class PlainCaller:
    """Calls stages directly."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def call(self, name: str, stage: Callable[[], Any]) -> Any:
        """Call the stage."""
        return stage()

    def submit(self, choose: Callable[[], tuple[str, Callable[[], Any]]], *, most: int) -> Future[Any]:
        """Queue a stage that a worker thread chooses."""
        return self._clock.beside(lambda: choose()[1](), most=most)


@dataclass(frozen=True, kw_only=True)
class TrialOf:
    """The place of a run in a sweep. The sweep has already checked the inputs of its trials.

    Args:
        forecast: what a ladder says of this run, its target: the fields of ``forecast_made``.
    """

    sweep: str
    trial: int
    forecast: dict[str, Any] | None = None


def create(
    config: Config,
    *,
    argv: list[str],
    run_id: str | None = None,
    of: TrialOf | None = None,
    forked: bool = False,
    origins: Origins | None = None,
    simulated: SimulationConfig | None = None,
    confirm: Callable[[], None] = lambda: None,
) -> RunPaths:
    """Create a run's directory, after checking the configuration and its inputs.

    Args:
        argv: the command line, recorded as provenance.
        run_id: id of the run; None: made from the experiment's name and the time.
        forked: the run continues from the checkpoint that ``fork`` names.
        origins: where the configuration's values came from, recorded as provenance.
        simulated: settings of the simulated cluster of a dry run; None: the defaults.
        confirm: called when all checks have passed; raises an error to refuse the run.

    Raises:
        ConfigError, DataError, LaunchError, RunExistsError, StorageError: nothing was created.
    """
    if run_id is not None:
        runs.check_run_id(run_id)
    run_id = run_id or runs.new_run_id(config.experiment_name)
    if config.fork.run is not None and not forked:
        at = f"--at {config.fork.step}"
        raise ConfigError("fork.run: only `hlatctl fork` sets it", hint=f"`hlatctl fork {config.fork.run} {at}`")
    if of is None:
        check_new(config, begun=forked)
        check_shape(config)
        check_remote(config, run_id)
        tracking.check_mirrors(config)
        check_notify(config)
    confirm()
    now_unix_s = (lambda: START_UNIX_S) if is_simulated(config) else time.time
    place: dict[str, Any] = {"sweep": of.sweep, "trial": of.trial} if of else {}
    fields = {"run_id": run_id, "simulated": is_simulated(config), "argv": [hide(word) for word in argv], **place}

    def begin(run: RunPaths) -> None:
        if origins is not None:
            files.write_json(run.origins, asdict(origins))
        if simulated is not None:
            simulation.write(run, simulated)
        with JournalWriter(run, FLOW_WRITER, now_unix_s=now_unix_s) as journal:
            journal.append("run_created", durable=True, **fields)
            if of is not None and of.forecast is not None:
                journal.append("forecast_made", durable=True, **of.forecast)

    return runs.create_run(Path(config.runs_dir), run_id, conf.load.dump(config), int(config.runs_mode, 8), begin)


#: Errors of a file system that can't link a file: another file system, or the rules for files of other users.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def adopt_checkpoint(source: Path, run: RunPaths) -> None:
    """Give a run that has not trained another run's checkpoint, as hard links where the file system allows them.

    The event is journalled first: a run that should have a checkpoint and lacks it must not start over.
    """
    manifest = read_manifest(source)
    target = run.checkpoint(manifest.step)
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("checkpoint_committed", durable=True, step=manifest.step, manifest_sha256=manifest.sha256)
    try:
        target.mkdir(parents=True)
        for name in [*(str(entry["path"]) for entry in manifest.files), MANIFEST]:  # last: a part never counts
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            _same_file(source / name, target / name)
        files.fsync(target)
    except OSError as error:
        raise cannot_write(f"{target}", error, hint=f"delete {run.root}, free space, and try again") from None


def _same_file(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        files.fsync(target)


def drive(
    run: RunPaths,
    observer: Observer | None = None,
    *,
    caller_of: Callable[[FlowContext], Caller] | None = None,
    keeps_nodes: bool = False,
) -> RunState:
    """Drive a run to its end; start or resume it.

    Args:
        caller_of: returns the caller of the stages, for runs without Prefect and MLflow; None: use both.
        keeps_nodes: a finished run doesn't release its nodes, because the caller passes them on to another run.

    Raises:
        RunBusyError: the run already has a driver.
        StoppedError: the run was stopped on request and can be resumed.
        HlatctlError: an error that a restart can't fix.
    """
    with storage_errors(), files.created_like(run.root), hold_driver(run):
        ctx = open_context(run, observer)
        ctx.keeps_nodes = keeps_nodes
        try:
            refuse_archived(run, ctx.state)
        except CheckpointError:
            ctx.close()
            raise
        _adopt(ctx)
        if ctx.state.status == "finished" and next_attempt(ctx.refresh(), ctx.config) is None:
            ctx.message(f"run {run.run_id} is finished")
            ctx.close()
            return ctx.state
        if (over := spending.used_up(run.run_id, ctx.state, ctx.config)) is not None:
            ctx.close()
            raise over
        _journal_start(ctx)
        followers: list[follower.Follower] = []
        if caller_of is None:
            followers = follower.start(ctx)
        try:
            while (resumed_after_s := _drive(ctx, caller_of)) is not None:
                ctx = _successor(ctx, resumed_after_s)
        except SystemExit:
            follower.abandon(followers)
            followers = []
            raise
        finally:
            follower.finish(ctx, followers)
            if links.is_missed(run) and prefect_api.is_up():
                prefect_stale.fill_missed(run, ctx.message)
            ctx.close()
        return ctx.refresh()


def _drive(ctx: FlowContext, caller_of: Callable[[FlowContext], Caller] | None) -> float | None:
    """Drive a run with one driver. Return None at the run's end, or the seconds until a dry run is resumed."""
    if caller_of:
        return _drive_with(ctx, caller_of(ctx), None)
    view = prefect_flow.begin(ctx)
    try:
        return _drive_with(ctx, view or PlainCaller(ctx.clock), view)
    finally:
        if view:
            view.finish(ctx.config.tracking.final_sync_timeout_s)


def _drive_with(ctx: FlowContext, caller: Caller, view: prefect_flow.PrefectView | None) -> float | None:
    run = ctx.run
    try:
        with ctx.signals.kept(), storage_errors(), view or nullcontext():
            pipeline(ctx, caller)
        _finish(ctx, "finished", "")
        finish_report(ctx)
        return None
    except HlatctlError as error:
        _finish(ctx, "stopped" if isinstance(error, StoppedError) else "failed", error.message, error.hint)
        if ctx.simulation and (after_s := ctx.simulation.resumed_after_s(error, ctx.state)) is not None:
            return after_s
        _report_anyway(ctx)
        raise
    except DriverLostError:
        return ctx.simulation.driver_restart_s if ctx.simulation else None
    except KeyboardInterrupt:
        ctx.signals.take()
        at_once = ctx.state.stop_requested  # set by the first interrupt
        message = f"run {run.run_id}: {'stopped at once, without a checkpoint' if at_once else 'interrupted'}"
        _finish(ctx, "stopped", message)
        kind = StoppedAtOnceError if at_once else StoppedError
        raise kind(message, hint=f"`hlatctl resume {run.run_id}` continues the run") from None
    except SystemExit:
        # SIGTERM: training continues, and the journal gets no end of the run.
        ctx.signals.take()
        training = "training continues" if ctx.training_lives() else "nothing is training"
        ctx.message(f"the run's driver ends, {training}; `hlatctl resume {run.run_id}` continues the run")
        raise


def _successor(ctx: FlowContext, after_s: float) -> FlowContext:
    """Return the context of the next driver of a dry run. It reads the journal, like `hlatctl resume`."""
    ctx.message(f"dry run: the run is resumed after {duration(after_s)}")
    if ctx.simulation:
        ctx.simulation.pass_without_driver(after_s)
    ctx.close()
    successor = open_context(ctx.run, ctx.observer, simulation=ctx.simulation)
    _adopt(successor)
    _journal_start(successor)
    return successor


def _adopt(ctx: FlowContext) -> bool:
    """Update a context to the configuration of the running or next attempt; return whether it has changed.

    Running jobs keep the launcher that started them (``flows.runtime.jobs``).
    """
    before = amended.adopt(ctx)
    if before.cluster != ctx.config.cluster:
        ctx.launcher.release(ctx.run.root)
        ctx.launcher = ctx.simulation.launcher() if ctx.simulation else launcher_for(ctx.config)
    return before != ctx.config


def _journal_start(ctx: FlowContext) -> None:
    # A dry run has none, because equal seeds give equal journals.
    token: dict[str, Any] = {} if ctx.simulation else {"token": driver_token(ctx.run)}
    ctx.event("head_started", pid=os.getpid(), host=platform.node(), **token)


def pipeline(ctx: FlowContext, caller: Caller) -> None:
    """Run the stages in order. A resumed run calls all again: each is idempotent."""
    _prepare(ctx, caller, measure=True)
    evaluations = _train_and_evaluate(ctx, caller)
    if "failed" in evaluations:
        raise EvaluationError(
            f"{evaluations.count('failed')} of {len(evaluations)} milestone evaluations failed; training is finished",
            hint=f"see {ctx.run.logs(0)}, then `hlatctl resume {ctx.run.run_id}`",
        )
    caller.call("report", partial(write_report, ctx))


def _prepare(ctx: FlowContext, caller: Caller, *, measure: bool) -> None:
    """Run the stages before training. Each skips what is done, except preflight, which runs to ``measure``."""
    caller.call("validate", partial(validate, ctx))
    caller.call("provenance", partial(record_provenance, ctx, ctx.state.argv or sys.argv))
    caller.call("data", partial(prepare_data, ctx))
    # From here on a scheduler keeps the nodes for the run, so everything that one node can do runs before.
    if measure:
        caller.call("preflight", partial(preflight, ctx))
    caller.call("compile", partial(compile_graphs, ctx))
    caller.call("warm cache", partial(warm_cache, ctx))
    caller.call("coverage", partial(check_coverage, ctx))


def _keep_up(ctx: FlowContext, caller: Caller) -> None:
    """Prepare for the configuration of the next attempt until no new amendment has arrived in the meantime."""
    before = ctx.config
    while _adopt(ctx):
        measured, wanted = map(fingerprint.hardware_fingerprint, (before, ctx.config))
        _prepare(ctx, caller, measure=measured != wanted)
        before = ctx.config


def _train_and_evaluate(ctx: FlowContext, caller: Caller) -> list[str]:
    """Train to the last step, evaluate milestones meanwhile, and return each milestone's status."""
    evaluations = Evaluations(ctx, caller.submit)
    remove_left_over(ctx.run, ctx.state.milestones.values())
    try:
        for left_over in due_milestones(ctx):
            evaluations.add(left_over)
        while (number := next_attempt(ctx.refresh(), ctx.config)) is not None:
            if ctx.config.eval_placement == "between" and not ctx.training_lives():
                evaluations.finish()
            _keep_up(ctx, caller)
            decision = caller.call(f"train attempt {number}", partial(run_attempt, ctx, number, evaluations.announce))
            if decision.action == "done":
                ctx.clock.sleep(0)
            else:
                ctx.pause(decision.wait_s)
        announce_milestones(ctx, evaluations.add)
        if ctx.config.eval_placement == "between":
            evaluations.finish()  # on the nodes of training
        if not ctx.keeps_nodes:
            ctx.launcher.release(ctx.run.root)
        for announced_by_others in due_milestones(ctx):  # `hlatctl eval`, which may have failed since then
            evaluations.add(announced_by_others)
        if not evaluations.done:
            ctx.message("training is finished; waiting for the last evaluation")
        return evaluations.finish()
    except BaseException:
        evaluations.interrupt()
        raise


def _finish(ctx: FlowContext, outcome: str, message: str, hint: str = "") -> None:
    if outcome != "finished" or not ctx.keeps_nodes:
        ctx.launcher.release(ctx.run.root)
    state = ctx.refresh()
    ctx.event("run_finished", outcome=outcome, step=state.step, tokens=state.tokens, message=message, hint=hint)
    ctx.watch()


def _report_anyway(ctx: FlowContext) -> None:
    """Write the report of a run that stopped or failed. A reporting error must not hide the run's own error."""
    try:
        write_report(ctx)
    except HlatctlError as error:
        ctx.message(f"no report: {error.message}")
