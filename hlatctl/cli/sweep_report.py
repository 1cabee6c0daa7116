"""`hlatctl sweep-report`: what a sweep shows, as a page."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import RunsDir, find_run, find_sweep, say
from hlatctl.run.errors import ConfigError


def sweep_report(
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep's id, or the beginning of it.")],
    runs_dir: RunsDir = None,
) -> None:
    """Write a sweep's report, and print where.

    Arms and trials, best first; their losses in one figure, settings in another; which axes matter; and the best arm as
    a command and as an experiment (best.yaml). Beside the page lie summary.md, numbers.json and the figures. A sweep
    writes its report when it ends; while it goes on this does.
    """
    from flows.sweep import report

    found = find_sweep(sweep, runs_dir)
    if found is None:
        run = find_run(sweep, runs_dir)
        raise ConfigError(f"SWEEP={sweep}: {run.run_id} is a run and no sweep", hint=f"its report: {run.report}")
    page = report.build(found)
    typer.echo(page)
    say(f"summary.md, numbers.json and figures lie beside it{', and best.yaml' if found.best.is_file() else ''}")
