"""Names of runs and sweeps for the shell's completion. Only folders are listed, so thousands of runs are quick."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from hlatctl.run.runs import LATEST, list_runs, list_sweeps


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ``latest`` and the ids of runs, newest first, that begin with what was typed."""
    return _beginning(incomplete, [LATEST, *(run.run_id for run in reversed(_listed(list_runs, ctx)))])


def run_or_sweep_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the same, and the ids of sweeps."""
    sweeps = _beginning(incomplete, [sweep.run_id for sweep in _listed(list_sweeps, ctx)])
    return [*run_names(ctx, incomplete), *sweeps]


def _listed(list_folder: Any, ctx: typer.Context) -> list[Any]:
    """Return what a folder has; a folder that can't be read has nothing: completion must not print errors."""
    from conf.compose import default_runs_dir

    chosen = ctx.params.get("runs_dir")
    with suppress(OSError):
        return list(list_folder(Path(chosen).expanduser() if chosen else default_runs_dir()))
    return []


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
