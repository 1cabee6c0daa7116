"""`hlatctl status`: how one run stands."""

from __future__ import annotations

import dataclasses
from typing import Any

import typer

from hlatctl.cli.common import Json, RunName, RunsDir, RunView, columns, find_run, look, print_json, say
from hlatctl.cli.summary import status_rows, validation_loss
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState

_GOES_ON = {
    "created": "nobody drives it",
    "interrupted": "the process that drove it is gone",
    "stopped": "it was stopped",
    "failed": "once the cause is mended",
}


def status(run: RunName, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Tell how a run stands.

    Stage, step, loss, speed, attempts, milestones.
    """
    view = look(find_run(run, runs_dir))
    if as_json:
        print_json(_record(view))
        return
    typer.echo(columns([[name, text] for name, text in status_rows(view)]))
    if view.status in _GOES_ON:
        say(f"hint: hlatctl resume {view.run.run_id} goes on with it ({_GOES_ON[view.status]})")


def _record(view: RunView) -> dict[str, Any]:
    state = view.state
    return {
        "run_id": view.run.run_id, "path": str(view.run.root), "status": view.status, "head_pid": view.head_pid,
        "simulated": state.simulated, "step": state.step, "total_steps": view.total_steps, "tokens": state.tokens,
        "last_step": state.last_step, "validation_loss": validation_loss(state), "checkpoints": state.checkpoints,
        "stages": [dataclasses.asdict(stage) for stage in state.stages.values()],
        "attempts": [dataclasses.asdict(attempt) for attempt in state.attempts],
        "milestones": [dataclasses.asdict(milestone) for milestone in state.milestones.values()],
        "gradient_spikes": len(state.spikes), "warnings": state.warnings, "message": state.message or view.problem,
        "report": _report(view.run, state),
    }  # fmt: skip


def _report(run: RunPaths, state: RunState) -> str | None:
    page = run.report / "index.html"
    return str(page) if page.is_file() else None
