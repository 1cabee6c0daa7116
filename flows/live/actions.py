"""Changes that the page makes to a run or a sweep, with the checks and confirmations of the commands.

Each action has two answers: with ``check=1`` the lines that a person reads before confirming, and nothing is changed.
``flows.live.session`` decides who may ask for either. Whoever has stolen the page's cookie must not get to run code.
So an amendment from the page changes only numbers, switches and fixed choices: no value of it can name code, a command,
a file or an address (``conf.amendments.is_harmless``).
"""

from __future__ import annotations

import difflib
from typing import Any, get_args

from starlette.datastructures import QueryParams

from conf.amendments import fields_of, is_harmless
from conf.of_run import newest_amendment, of_run
from conf.schema.tracking import NotifyKind
from flows import amendments, tidy
from flows.control import (
    cost_of_rest,
    evaluating_process,
    job_text,
    request_stop,
    request_sweep_stop,
    stop_evaluator_jobs,
)
from flows.runtime import programs
from hlatctl.driver_job import driver_job
from hlatctl.report.run_view import sweep_at_rest, view_run, view_sweep
from hlatctl.run import labels as run_labels
from hlatctl.run.errors import ConfigError, RunBusyError
from hlatctl.run.lease import driver
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.processes import user_name
from hlatctl.run.sweep import ENDED
from hlatctl.units import counted, size

Answer = dict[str, Any]
_STOPS_RUN = "The run writes a checkpoint and stops. You can resume it later."
_STOPS_EVALUATION = "The evaluation stops. Finished tasks are kept, and you can continue it later."


def stop(run: RunPaths, given: QueryParams) -> Answer:
    """Ask a run to write a checkpoint and stop, and stop a job that evaluates it; doesn't wait for either.

    Raises:
        RunBusyError: the run has already ended, and no job evaluates it.
        LaunchError: the scheduler can't be reached, so the job that evaluates it is not stopped.
        StorageError: the request can't be written.
    """
    view, evaluation = view_run(run), driver_job(run.evaluator_job)
    rests = view.at_rest and not driver_job(run.driver_job)
    if rests and evaluation is None:
        hint = evaluating_process(run) or "reload the page to see its state"
        raise RunBusyError(f"run {run.run_id}: is already {view.status}", hint=hint)
    if "check" in given:
        lines = []
        if not rests:
            lines.append(_STOPS_EVALUATION if view.state.evaluates else _STOPS_RUN)
            if (sweep := view.state.sweep) and driver(SweepPaths(run.root.parent / sweep)):
                lines.append(
                    f"Sweep {sweep} counts it as pruned, and starts the next trial. Its page stops all trials."
                )
        if view.driver_elsewhere:
            lines.append(f"Its driver is {view.driver_elsewhere}, which reads the request from the run's journal.")
        if evaluation:
            state = job_text(run.evaluator_job)
            lines.append(f"The job that evaluates the run stops. Finished tasks are kept. Its state: {state}.")
        return {"lines": lines}
    if evaluation:
        stop_evaluator_jobs(run, 0.0)
    if not rests:
        request_stop(run, by=user_name(), wait_s=0.0)
    return {"run_id": run.run_id, "status": view_run(run).status}


def resume(run: RunPaths, given: QueryParams) -> Answer:
    """Start a driver for a run in a process of its own, and return when it drives the run.

    Raises:
        RunBusyError: the run has a driver, or there is nothing to continue.
        HlatctlError: its budget is used up, or the driver doesn't start.
    """
    view = view_run(run)
    if not view.ended:
        where = view.driver_elsewhere or f"process {view.driver_pid}"
        raise RunBusyError(f"run {run.run_id}: {where} drives it", hint="stop it first, or wait until it ends")
    if not view.can_resume:
        raise RunBusyError(
            f"run {run.run_id}: is {view.status}", hint=f"`hlatctl status {run.run_id}` shows what can be done"
        )
    config = of_run(run)
    expense = cost_of_rest(run, config)
    if "check" in given:
        lines = ["The run continues from its newest checkpoint, with a driver on the server's machine."]
        if expense and config.cluster.jobs_run == "cluster":
            lines.append(f"Cost of the rest of the run: {expense.text()}.")
        if expense and (why := expense.why_ask(config.cluster, "the rest of the run")):
            lines.append(f"{why}.")
        return {"lines": lines}
    started = programs.start_driver(run)
    return {"run_id": run.run_id, "status": "running", "pid": started.pid}


def stop_sweep(sweep: SweepPaths, given: QueryParams) -> Answer:
    """Ask a sweep to stop all its trials, as `hlatctl stop SWEEP` does; doesn't wait for them.

    Raises:
        RunBusyError: it has already ended.
        StorageError: the request can't be written.
    """
    state, pid = view_sweep(sweep)
    if sweep_at_rest(state, pid) and not driver_job(sweep.driver_job):
        what = f"{state.noun} {sweep.run_id}: is already {state.status}"
        raise RunBusyError(what, hint="reload the page to see its state")
    if "check" in given:
        running = state.count("running", "stopping")
        held, left = driver(sweep), state.trials_planned - len(state.trials)
        lines = [
            f"Running trials: {running}. Each one writes a checkpoint and stops.",
            f"Trials that have not started: {left} of {state.trials_planned}. None of them starts.",
            f"You can resume the {state.noun} later.",
        ]
        if held is None:
            lines.append("Its driver is dead, so the trials are asked directly.")
        elif held.is_elsewhere:
            lines.append(f"Its driver is {held}, which reads the request from the journal.")
        return {"lines": lines}
    request_sweep_stop(sweep, by=user_name(), wait_s=0.0)
    return {"sweep_id": sweep.run_id, "status": view_sweep(sweep)[0].status}


def resume_sweep(sweep: SweepPaths, given: QueryParams) -> Answer:
    """Start a driver for a sweep in a process of its own, and return when it drives the sweep.

    Raises:
        RunBusyError: the sweep has a driver, or there is nothing to continue.
        HlatctlError: the driver doesn't start.
    """
    state, _ = view_sweep(sweep)
    if held := driver(sweep):
        raise RunBusyError(
            f"{state.noun} {sweep.run_id}: {held} drives it", hint="stop it first, or wait until it ends"
        )
    if state.status == "finished":
        raise RunBusyError(
            f"{state.noun} {sweep.run_id}: is finished", hint=f"`hlatctl sweep --extend {sweep.run_id}` adds arms"
        )
    if "check" in given:
        left, parallel = state.trials_planned - state.count(*ENDED), state.settings.get("parallel", 1)
        text = f"Trials that are left: {left} of {state.trials_planned}. At most {parallel} run at the same time."
        return {"lines": [text, "Paused trials continue from their newest checkpoints. Trials that have ended stay."]}
    started = programs.start_driver(sweep)
    return {"sweep_id": sweep.run_id, "status": "running", "pid": started.pid}


def labels(run: RunPaths, given: QueryParams) -> Answer:
    """Change the name or the tags of a run or a sweep, or add a note."""
    change = run_labels.change(
        name=given.get("name"), tags=given.getlist("tag"), untag=given.getlist("untag"), note=given.get("note", "")
    )
    run_labels.write_label(run, change, by=user_name())
    return {"run_id": run.run_id}


def amend(run: RunPaths, given: QueryParams) -> Answer:
    """Change a run's configuration, as `hlatctl amend` does, but only keys that can't name code, files or addresses.

    Raises:
        ConfigError: a key can't be changed from the page, or as :func:`flows.amendments.amend`.
        RunBusyError: another amendment was made since the check.
        HlatctlError: as :func:`flows.amendments.amend`.
    """
    overrides = [text.strip() for text in given.getlist("set") if text.strip()]
    _check_keys(run, overrides)
    only_check, number = "check" in given, given.get("number", "")
    if not only_check and not number.isdecimal():
        raise ConfigError(f"number={number:.20}: must be that of the amendment's check", hint="use the page's dialog")
    amended = amendments.amend(
        run,
        overrides,
        by=user_name(),
        why=given.get("why", ""),
        at=given.get("at") or None,
        number=None if only_check else int(number[:9]),
        only_check=only_check,
    )
    lines = amendments.effects(run, amended, overrides) if amended.number else ["Nothing changes."]
    return {"lines": lines, "number": amended.number}


def _check_keys(run: RunPaths, overrides: list[str]) -> None:
    known = fields_of(of_run(run))
    for text in overrides:
        key, has_value, _ = text.partition("=")
        if not has_value:
            raise ConfigError(f"{text:.80}: has no value", hint="optimizer.lr=1e-4")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise ConfigError(f"{key:.80}: no such key", hint=near[0] if near else "the tab Settings lists the keys")
        if not is_harmless(key):
            raise ConfigError(
                f"{key}: can't be changed from the page, which changes only numbers, switches and fixed choices",
                hint=f"`hlatctl amend {run.run_id} {key}=VALUE`",
            )


def archive(run: RunPaths, given: QueryParams) -> Answer:
    """Remove an idle run's checkpoints except the newest verified one, as `hlatctl archive` does.

    Raises:
        RunBusyError: something works on the run, or it has another newest checkpoint than when it was checked.
        StorageError: the run belongs to somebody else, or its checkpoints can't be removed.
    """
    tidy.check_idle(run)
    keeps, found = tidy.newest_valid(run, lambda _text: None), tidy.content(run)
    stays = "none" if keeps is None else str(keeps)
    if "check" in given:
        which = "No checkpoint is kept." if keeps is None else f"The checkpoint of step {keeps:,} is kept."
        lines = [
            f"This removes {size(found.checkpoints_bytes)} in {counted(found.checkpoints, 'checkpoint')}. {which}",
            "An archived run can't be resumed. Its report, curves and scores are kept.",
            *(f"{fork} was forked from it; that run keeps its own checkpoint." for fork in found.forks),
        ]
        return {"lines": lines, "keeps": stays}
    if given.get("keeps") != stays:
        raise RunBusyError(f"run {run.run_id}: its newest checkpoint has changed", hint="archive it again")
    freed = tidy.archive(run, keeps=keeps, by=user_name())
    return {"run_id": run.run_id, "bytes": freed}


#: What each kind of message is about.
_KINDS = {
    "failed": "The run has ended with an error",
    "needs_person": "The run waits for a person",
    "walked_back": "Training restarts from an earlier checkpoint, or without a batch",
    "node_left_out": "An attempt starts without a node",
    "alarm": "Other alarms, such as a loss close to zero",
    "loss_spike": "Loss or gradient norm spikes",
    "stall": "Training makes no progress",
    "budget": "The budget is nearly used up",
    "milestone": "A milestone has scores",
    "finished": "The run is finished",
    "stopped": "The run was stopped on request",
    "straggler": "A process is slower than the rest",
    "amended": "The configuration was amended",
    "forecast_slip": "The predicted end is a day later",
}
assert set(_KINDS) == set(get_args(NotifyKind))


def alerts(run: RunPaths) -> Answer:
    """Return which messages a run sends, and where. The page switches them with an amendment of ``notify.on``."""
    notify = of_run(run).notify
    kinds = [{"name": name, "says": says, "on": name in notify.on} for name, says in _KINDS.items()]
    return {"services": notify.urls, "kinds": kinds, "number": newest_amendment(run) + 1}
