"""`hlatctl drill`: injects faults into a short run and checks that it recovers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hlatctl.cli.common import ConfigDirs, Json, Overrides, RunsDir, columns, print_json, say, with_runs_dir, write
from hlatctl.run.errors import StoppedError, TrainingError
from hlatctl.run.paths import RunPaths

_EXPERIMENT = "experiment="


def drill(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    fault: Annotated[
        list[str] | None, typer.Option(help="Fault to inject; can be repeated.  [default: all]", show_default=False)
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Inject faults into a short run and check that it recovers.

    Injects one fault after another: processes killed, stopped, slowed and preempted; data and checkpoints damaged;
    trackers, driver and disk lost; on Slurm, also a node's program killed and the job cancelled. At the end every loss
    must equal that of an undisturbed run. All files are in a new folder under the runs folder, and other runs are not
    changed. Takes a few minutes. The exit code is 20 if a recovery failed.
    """
    from conf.compose import compose
    from flows.drill.exercise import check_names, exercise, new_folder
    from flows.drill.faults import offered

    check_names(fault or [])
    chosen = with_runs_dir(overrides, runs_dir)
    if not any(override.lstrip("+").startswith(_EXPERIMENT) for override in chosen):
        chosen = [f"{_EXPERIMENT}drill", *chosen]
    config = compose(chosen, to_start=False)  # what can't be drilled is refused first
    folder = new_folder(Path(config.runs_dir))
    try:
        run = exercise(config, folder, fault or offered(config), argv=sys.argv, say=say)
    except KeyboardInterrupt:
        raise StoppedError(
            f"the drill was interrupted; its files are in {folder}", hint="`hlatctl drill` begins a new one"
        ) from None
    show(run, as_json=as_json)


def show(run: RunPaths, *, as_json: bool) -> None:
    """Print the results of a drill.

    Raises:
        TrainingError: the run did not recover from every fault.
    """
    from hlatctl.report import drill as report

    results = report.drill(report.read(run))
    assert results is not None  # exercise has just written it
    if as_json:
        print_json(
            {
                "run": str(run.root),
                "steps": results.steps,
                "cold_start_s": results.cold_start_s,
                "killed_to_step_s": results.killed_to_step_s,
                "outcomes": results.outcomes,
            }
        )
    else:
        write(columns([[cell.upper() for cell in report.HEADER], *report.rows(results)]) + "\n")
        write(columns([list(fact) for fact in report.facts(results)]))
    say(f"report: {run.report / 'index.html'}")
    if results.failed:
        raise TrainingError(
            f"the run did not recover from: {'; '.join(results.failed)}",
            hint=f"the runs and their logs are in {run.root.parent}",
        )
