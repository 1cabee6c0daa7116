"""`hlatctl runs`: lists all runs of a folder."""

from __future__ import annotations

from typing import Any

import typer

from hlatctl.cli.common import Json, RunsDir, columns, print_json, runs_folder, say
from hlatctl.report.run_view import RunView, view_run
from hlatctl.run.journal import number
from hlatctl.run.runs import list_runs
from hlatctl.run.simulated import marked
from hlatctl.units import count, utc

_HEADER = ["RUN", "STATUS", "STEP", "TOKENS", "LOSS", "VALIDATION", "CREATED"]


def runs(as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """List all runs, oldest first."""
    folder = runs_folder(runs_dir)
    views = [view_run(run) for run in list_runs(folder)]
    if as_json:
        print_json([_record(view) for view in views])
    elif views:
        typer.echo(columns([_HEADER, *(_row(view) for view in views)]))
    else:
        say(f"there are no runs in {folder}; `hlatctl train` starts one")


def _record(view: RunView) -> dict[str, Any]:
    state, last = view.state, view.state.last_step
    return {
        "run_id": view.run.run_id,
        "status": view.status,
        "simulated": state.simulated,
        "step": state.step,
        "total_steps": view.total_steps,
        "tokens": state.tokens,
        "loss": last.get("loss") if last else None,
        "validation_loss": state.validation_loss,
        "created_unix_s": state.created_unix_s or None,
        "path": str(view.run.root),
        "problem": view.problem or None,
    }


def _row(view: RunView) -> list[str]:
    state, last, validation = view.state, view.state.last_step, view.state.validation_loss
    return [
        view.run.run_id,
        marked(view.status, simulated=state.simulated),
        f"{state.step}/{view.total_steps or '?'}",
        count(state.tokens),
        f"{number(last, 'loss'):.4f}" if last else "-",
        "-" if validation is None else f"{validation:.4f}",
        utc(state.created_unix_s) if state.created_unix_s else "-",
    ]
