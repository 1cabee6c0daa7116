"""`hlatctl status`: shows the state of a run or a sweep."""

from __future__ import annotations

import dataclasses
from typing import Any

from hlatctl.cli.common import Json, RunOrSweepName, RunsDir, columns, find_run, find_sweep, print_json, say, write
from hlatctl.cli.evaluation_rows import queue_record
from hlatctl.cli.summary import label_rows, status_rows
from hlatctl.report.run_view import INTERRUPTED, RunView, view_run, view_sweep
from hlatctl.run.paths import SweepPaths
from hlatctl.run.runs import LATEST

#: Reason to resume, by status.
_RESUMABLE = {
    "created": "it has no driver",
    INTERRUPTED: "its driver is not running",
    "stopped": "it was stopped",
    "failed": "fix the cause first",
}


def status(run: RunOrSweepName = LATEST, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Show the state of a run or a sweep.

    Shows a run's stage, step, loss, speed, attempts and milestones, or a sweep's arms, best first.
    """
    if swept := find_sweep(run, runs_dir):
        _sweep_status(swept, as_json=as_json)
        return
    view = view_run(find_run(run, runs_dir))
    if as_json:
        print_json(_record(view))
        return
    write(columns([[name, text] for name, text in status_rows(view)]))
    if view.status in _RESUMABLE:
        say(f"hint: `hlatctl resume {view.run.run_id}` continues the run ({_RESUMABLE[view.status]})")


def _record(view: RunView) -> dict[str, Any]:
    state, page = view.state, view.run.report / "index.html"
    return {
        "run_id": view.run.run_id,
        "path": str(view.run.root),
        "status": view.status,
        "head_pid": view.driver_pid,
        "head_elsewhere": view.driver_elsewhere or None,
        "simulated": state.simulated,
        "step": state.step,
        "total_steps": view.total_steps,
        "tokens": state.tokens,
        "last_step": state.last_step,
        "used": state.used,
        "validation_loss": state.validation_loss,
        "checkpoints": state.checkpoints,
        "stages": [dataclasses.asdict(stage) for stage in state.stages.values()],
        "attempts": [dataclasses.asdict(attempt) for attempt in state.attempts],
        "milestones": [dataclasses.asdict(milestone) for milestone in state.milestones.values()],
        "evaluation_queue": queue_record(view),
        "gradient_spikes": len(state.spikes),
        "warnings": state.warnings,
        "message": state.message or view.problem,
        "report": str(page) if page.is_file() else None,
    }


def _sweep_status(sweep: SweepPaths, *, as_json: bool) -> None:
    from hlatctl.report import sweep as report

    state, pid = view_sweep(sweep)
    if as_json:
        print_json({**dataclasses.asdict(state), "path": str(sweep.root), "head_pid": pid})
        return
    labels = [list(fact) for fact in label_rows(state.labels)]
    write(columns([*labels, *(list(fact) for fact in report.facts(state))]))
    if state.trials:
        write("\n" + columns([report.header(state), *report.rows(state)]))
    if pid is None and state.status in _RESUMABLE:
        say(f"hint: `hlatctl resume {sweep.run_id}` continues the sweep ({_RESUMABLE[state.status]})")
