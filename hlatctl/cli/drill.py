"""`hlatctl drill`: break a real run on purpose and see whether it recovers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hlatctl.cli.common import Json, Overrides, columns, print_json, say
from hlatctl.run.errors import ConfigError, TrainingError
from hlatctl.run.paths import RunPaths
from hlatctl.run.suggest import suggest

_EXPERIMENT = "experiment="


def drill(
    overrides: Overrides = None,
    fault: Annotated[
        list[str] | None, typer.Option(help="Fault to inject; can be repeated.  [default: all]", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Inject faults into a short run and check that it recovers.

    Injects one fault after another: processes killed, stopped, slowed and preempted; data and checkpoints damaged;
    trackers, driver and disk lost. At the end every loss must equal that of an undisturbed run. All files are in a
    new folder under the runs folder, and other runs are not changed. Takes a few minutes. The exit code is 20 if a
    recovery failed.
    """
    from conf.compose import compose
    from flows.drill.exercise import exercise, new_folder
    from flows.drill.faults import FAULTS

    faults = fault or list(FAULTS)
    for name in faults:
        _check(name, list(FAULTS))
    asked = overrides or []
    # Short steps, small limits: what a drill needs, unless somebody drills an experiment of their own.
    own = any(override.lstrip("+").startswith(_EXPERIMENT) for override in asked)
    config = compose([*([] if own else [f"{_EXPERIMENT}drill"]), *asked])
    run = exercise(config, new_folder(Path(config.runs_dir)), faults, argv=sys.argv, say=say)
    show(run, as_json=as_json)


def show(run: RunPaths, *, as_json: bool) -> None:
    """Print what a drill has shown.

    Raises:
        TrainingError: the run did not recover from every fault.
    """
    from hlatctl.report import drill as report
    from hlatctl.run.journal import read_events

    found = report.drill(read_events(run))
    assert found is not None  # exercise has just written it
    if as_json:
        print_json(
            {
                "run": str(run.root),
                "steps": found.steps,
                "cold_start_s": found.cold_start_s,
                "killed_to_step_s": found.killed_to_step_s,
                "outcomes": found.outcomes,
            }
        )
    else:
        typer.echo(columns([[cell.upper() for cell in report.HEADER], *report.rows(found)]) + "\n")
        typer.echo(columns([list(fact) for fact in report.facts(found)]))
    say(f"report: {run.report / 'index.html'}")
    if found.failed:
        raise TrainingError(
            f"the run did not recover from: {'; '.join(found.failed)}",
            hint=f"the runs and their logs are in {run.root.parent}",
        )


def _check(name: str, known: list[str]) -> None:
    if name not in known:
        raise ConfigError(f"--fault={name}: no such fault", hint=suggest(name, known))
