"""`hlatctl runs`: lists all runs of a folder."""

from __future__ import annotations

import dataclasses

import typer

from hlatctl.cli.common import Json, RunsDir, columns, print_json, runs_folder, say
from hlatctl.report.run_index import Row, rows
from hlatctl.run.journal import number
from hlatctl.run.simulated import marked
from hlatctl.units import count, utc

_HEADER = ["RUN", "STATUS", "STEP", "TOKENS", "LOSS", "VALIDATION", "CREATED"]


def runs(as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """List all runs, oldest first."""
    folder = runs_folder(runs_dir)
    found = rows(folder)
    if as_json:
        print_json([dataclasses.asdict(row) for row in found])
    elif found:
        typer.echo(columns([_HEADER, *map(_cells, found)]))
    else:
        say(f"there are no runs in {folder}; `hlatctl train` starts one")


def _cells(row: Row) -> list[str]:
    return [
        row.run_id,
        marked(row.status, simulated=row.simulated),
        f"{row.step}/{row.total_steps or '?'}",
        count(row.tokens),
        f"{number({'loss': row.loss}, 'loss'):.4f}" if row.step else "-",
        "-" if row.validation_loss is None else f"{row.validation_loss:.4f}",
        utc(row.created_unix_s) if row.created_unix_s else "-",
    ]
