"""`hlatctl runs`: lists the runs and sweeps of a folder."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from hlatctl.cli.common import Json, RunsDir, columns, find_sweep, print_json, runs_folder, say, write
from hlatctl.report import run_list
from hlatctl.report.run_index import Row, rows
from hlatctl.report.run_view import view_sweep
from hlatctl.run.errors import RunNotFoundError
from hlatctl.run.journal import number
from hlatctl.run.labels import in_words
from hlatctl.run.runs import list_sweeps
from hlatctl.run.simulated import marked
from hlatctl.units import count, one_line

#: Columns in order, and how soon a narrow terminal loses each: the highest number first, 0 never.
_COLUMNS = {
    "RUN": 0,
    "STATUS": 0,
    "STEP": 0,
    "TOKENS": 4,
    "LOSS": 0,
    "VALIDATION": 3,
    "SCORES": 6,
    "AGE": 1,
    "COST": 5,
    "NAME": 2,
    "TAGS": 7,
    "DIFFERS IN": 2,
}
_WIDEST_CELL = 40


def runs(
    sweep: Annotated[
        str | None, typer.Argument(metavar="SWEEP", help="List the trials of this sweep.", show_default=False)
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="K[=V]", help="Only runs with this tag.", show_default=False)
    ] = None,
    status: Annotated[
        list[str] | None, typer.Option(help="Only runs with this status, such as running.", show_default=False)
    ] = None,
    experiment: Annotated[str | None, typer.Option(help="Only runs of this experiment.", show_default=False)] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGE|DATE", help="Only runs with an event since 7d, 12h or 2026-11-01.")
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help=f"Order of the runs: {', '.join(run_list.SORT_KEYS)}.")
    ] = "created",
    reverse: Annotated[bool, typer.Option("--reverse", help="Largest or newest first.")] = False,
    trials: Annotated[bool, typer.Option("--trials", help="Also list the trials of sweeps.")] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """List runs, oldest first, and sweeps.

    Shows what the command lines of the shown runs differ in. A terminal shows the columns that fit; piped output has
    all of them.
    """
    folder, now_unix_s = runs_folder(runs_dir), time.time()
    chosen = run_list.Filter(
        tags=run_list.tag_filter(tag or []),
        statuses=tuple(status or ()),
        experiment=experiment,
        since_unix_s=None if since is None else run_list.since(since, now_unix_s),
    )
    only = None if sweep is None else _sweep_of(sweep, runs_dir)
    everything = rows(folder)
    found = [row for row in everything if chosen.takes(row) and (only is None or row.sweep == only)]
    found = run_list.ordered(found, sort, reverse=reverse)
    if as_json:
        print_json([dataclasses.asdict(row) for row in found])
        return
    listed = [row for row in found if trials or only is not None or not row.sweep]
    if listed:
        write(_table(listed, now_unix_s))
    elif not everything:
        say(f"there are no runs in {folder}; `hlatctl train` starts one")
    elif not any(row.sweep for row in found):
        say(f"none of the {len(everything)} runs in {folder} is chosen")
    if only is None and not trials:
        _print_sweeps(folder, found)


def _sweep_of(name: str, runs_dir: Path | None) -> str:
    found = find_sweep(name, runs_dir)
    if found is None:
        raise RunNotFoundError(f"{name}: no sweep of that name", hint="`hlatctl runs` lists runs and sweeps")
    return found.run_id


def _print_sweeps(folder: Path, found: list[Row]) -> None:
    """Print a line for each sweep that has one of the rows."""
    shown = {row.sweep for row in found if row.sweep}
    lines = []
    for paths in list_sweeps(folder):
        if paths.run_id in shown:
            state, _ = view_sweep(paths)
            done = f"{state.count('finished')} of {state.trials_planned} trials finished"
            status = marked(state.status, simulated=state.simulated)
            lines.append([paths.run_id, status, done, state.labels.name, in_words(state.labels.tags)])
    if lines:
        write("\n" + columns([["SWEEP", "STATUS", "TRIALS", "NAME", "TAGS"], *lines]))
        say(f"`hlatctl runs {lines[-1][0]}` lists the trials of a sweep")


def _table(found: list[Row], now_unix_s: float) -> str:
    """Return the columns that have a value in one of the rows and, on a terminal, fit."""
    cells = [_cells(row, differs, now_unix_s) for row, differs in zip(found, run_list.differing(found), strict=True)]
    shown = [name for name in _COLUMNS if not _COLUMNS[name] or any(row[name] not in ("", "-") for row in cells)]
    if sys.stdout.isatty():
        shown = _fitting(shown, cells, shutil.get_terminal_size().columns)
    return columns([shown, *([row[name] for name in shown] for row in cells)])


def _fitting(shown: list[str], cells: list[dict[str, str]], width: int) -> list[str]:
    shown = list(shown)
    for row in cells:
        for name in shown:
            if len(row[name]) > _WIDEST_CELL and name != "RUN":
                row[name] = one_line(row[name])[: _WIDEST_CELL - 1] + "…"
    while sum(max(len(name), *(len(row[name]) for row in cells)) + 2 for name in shown) - 2 > width:
        worst = max(shown, key=lambda name: _COLUMNS[name])
        if not _COLUMNS[worst]:
            break
        shown.remove(worst)
    return shown


def _cells(row: Row, differs: str, now_unix_s: float) -> dict[str, str]:
    scores = {task: value for task, value in row.scores.items() if not task.startswith("validation")}
    return {
        "RUN": row.run_id,
        "STATUS": marked(row.status, simulated=row.simulated),
        "STEP": f"{row.step}/{row.total_steps or '?'}",
        "TOKENS": count(row.tokens),
        "LOSS": f"{number({'loss': row.loss}, 'loss'):.4f}" if row.step else "-",
        "VALIDATION": "-" if row.validation_loss is None else f"{row.validation_loss:.4f}",
        "SCORES": " ".join(f"{task}={value:.3f}" for task, value in scores.items()) or "-",
        "AGE": run_list.age(row, now_unix_s),
        "COST": "-" if row.cost_usd is None else f"{row.cost_usd:,.2f} USD",
        "NAME": row.name,
        "TAGS": in_words(row.tags),
        "DIFFERS IN": differs,
    }
