"""`hlatctl sync`: copies missing journal entries to MLflow, and marks dead flow runs in Prefect."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from hlatctl.cli.common import RunsDir, find_run, runs_folder, say
from hlatctl.run.runs import list_runs


def sync(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run to copy.  [default: all runs]", show_default=False)
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Copy missing journal entries to MLflow.

    Copies the entries of one run, or of all runs. Also marks flow runs in Prefect as Crashed if their process has died.
    """
    from flows.tracking import mlflow_sync, prefect_stale

    runs = [find_run(run, runs_dir)] if run else list_runs(runs_folder(runs_dir))
    for paths in runs:
        typer.echo(f"{paths.run_id}\t{mlflow_sync.sync(paths, partial(_say_of, paths.run_id))}")
    if not runs:
        say(f"there are no runs in {runs_folder(runs_dir)}")
    prefect_stale.bring_up_to_date(runs_folder(runs_dir), say)


def _say_of(run_id: str, text: str) -> None:
    say(f"{run_id}: {text}")
