"""`hlatctl sweep-report`: writes a sweep's report."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import RunsDir, find_sweep_only, say, write


def sweep_report(
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="Sweep id, or a unique beginning of one.")],
    runs_dir: RunsDir = None,
) -> None:
    """Write a sweep's report and print its path.

    The report shows arms and trials, best first; a figure of their losses and one of their settings; which axes matter;
    and the best arm as a command and as an experiment (best.yaml). summary.md, numbers.json and the figures are in the
    same folder. A sweep writes its report when it ends. This command writes it at any time.
    """
    from flows.sweep import report

    paths = find_sweep_only(sweep, runs_dir, "SWEEP")
    write(report.build(paths))
    say(f"in the same folder: summary.md, numbers.json, figures{', best.yaml' if paths.best.is_file() else ''}")
