"""`hlatctl sync`: copies missing journal entries to MLflow and mirrors, and marks dead flow runs in Prefect."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import RunsDir, find_run, runs_folder, say, write
from hlatctl.run.errors import RunBusyError
from hlatctl.run.runs import list_runs

if TYPE_CHECKING:
    from conf.schema import MirrorName
    from hlatctl.run.paths import RunPaths


def sync(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run to copy.  [default: all runs]", show_default=False)
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Copy to TensorBoard's event files only.")] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="Copy to Weights & Biases only.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Copy what is missing to MLflow and the mirrors.

    Copies the entries of one run, or of all runs. Also marks flow runs in Prefect as Crashed if their process has died.

    With --tensorboard or --wandb, copies to that service only, also runs that were trained without it.
    """
    runs = [find_run(run, runs_dir)] if run else list_runs(runs_folder(runs_dir))
    if not runs:
        say(f"there are no runs in {runs_folder(runs_dir)}")
    asked: dict[MirrorName, bool] = {"tensorboard": tensorboard, "wandb": wandb}
    only = [name for name, is_asked in asked.items() if is_asked]
    if only:
        _check(runs, only)
    for paths in runs:
        _copy(paths, only)
    if not only:
        from flows.tracking import prefect_stale

        prefect_stale.bring_up_to_date(runs_folder(runs_dir), say)


def _check(runs: list[RunPaths], only: list[MirrorName]) -> None:
    """Refuse a service whose package or credential is missing before anything is copied."""
    from dataclasses import replace

    from conf import mirrors
    from conf.of_run import of_run

    for run in runs[:1]:
        config = of_run(run)
        mirrors.check(replace(config, tracking=replace(config.tracking, mirrors=only)))


def _copy(run: RunPaths, only: list[MirrorName]) -> None:
    """Copy one run, and print how many entries each service lacked."""
    from conf.of_run import of_run
    from flows.tracking import mlflow_sync
    from flows.tracking.mirrors import sync

    if not only:
        write(f"{run.run_id}\t{mlflow_sync.sync(run, partial(_say_of, run.run_id))}")
    for name in only or of_run(run).tracking.mirrors:
        try:
            write(f"{run.run_id}\t{sync.sync(run, name)}\t{name}")
        except RunBusyError as error:  # its own follower, which copies everything
            say(error.message)


def _say_of(run_id: str, text: str) -> None:
    say(f"{run_id}: {text}")
