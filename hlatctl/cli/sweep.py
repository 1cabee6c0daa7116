"""`hlatctl sweep` and `sweep-report`: start runs that differ in a few keys, compare them, and write a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import (
    ConfigDirs,
    Name,
    Note,
    Overrides,
    RunsDir,
    Tags,
    Yes,
    announce,
    confirm,
    find_sweep_only,
    say,
    with_runs_dir,
    write,
)
from hlatctl.cli.drivers import Detach, DriverAs, submit_of
from hlatctl.cli.train import drive
from hlatctl.run.labels import WARNING, Change, change, write_label
from hlatctl.run.processes import user_name

if TYPE_CHECKING:
    from flows.sweep.create import Prepared


def sweep(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Simulate every trial; nothing is trained.")] = False,
    sweep_id: Annotated[str | None, typer.Option(help="Id of the sweep.  [default: made from name and time]")] = None,
    extend: Annotated[str | None, typer.Option(metavar="SWEEP", help="Continue this sweep with more values.")] = None,
    name: Name = None,
    tag: Tags = None,
    note: Note = "",
    yes: Yes = False,
    detach: Detach = False,
    driver_as: DriverAs = None,
    runs_dir: RunsDir = None,
) -> None:
    """Start runs that differ in a few keys, and compare them.

    A key with several values is an axis, in Hydra's syntax: optimizer.beta2=0.95,0.99 or
    'optimizer.lr=interval(1e-4,1e-3)'. The sweep.* keys set how values are tried (sweep.trials, sweep.seeds,
    sweep.parallel, sweep.pruner, ...). Each trial is a run. Prints the sweep's id. Ctrl-C stops the sweep with
    checkpoints, and `hlatctl resume` continues it.
    """
    from flows.sweep import create

    labels = change(name=name, tags=tag or (), note=note)
    if extend is not None:
        _extend(extend, overrides or [], runs_dir, yes=yes, detach=detach, driver_as=driver_as)
        return
    prepared = create.prepare(with_runs_dir(overrides, runs_dir), folder=Path.cwd(), simulated=dry_run)
    start(prepared, sweep_id, labels, "the sweep", yes=yes, detach=detach, driver_as=driver_as)


def start(
    prepared: Prepared,
    sweep_id: str | None,
    labels: Change,
    what: str,
    *,
    yes: bool,
    detach: bool,
    driver_as: str | None,
) -> None:
    """Create and drive a sweep or a ladder that was prepared, after its price is confirmed.

    Args:
        labels: name, tags and note, as ``hlatctl.run.labels.change`` returns them.
        what: what is confirmed, such as ``the sweep``.
    """
    from flows.sweep import create

    submit = submit_of(prepared.cluster, driver_as, detach=detach)
    if prepared.simulated:
        say(WARNING)
    say(prepared.plan.text())
    confirm(prepared.plan.expense, prepared.cluster, what, yes=yes, dry_run=prepared.simulated)
    made = create.make(prepared, sweep_id=sweep_id, argv=sys.argv)
    write_label(made, labels, by=user_name())
    drive(made, detach=detach, submit=submit)


def _extend(
    name: str, overrides: list[str], runs_dir: Path | None, *, yes: bool, detach: bool, driver_as: str | None
) -> None:
    from flows.sweep import create

    extended = find_sweep_only(name, runs_dir, "--extend")
    prepared = create.prepare_more(extended, overrides)
    submit = submit_of(prepared.cluster, driver_as, detach=detach)
    announce(extended)
    say(prepared.plan.text())
    confirm(prepared.plan.expense, prepared.cluster, "the sweep", yes=yes, dry_run=prepared.simulated)
    create.extend(extended, prepared, argv=sys.argv)
    drive(extended, detach=detach, submit=submit)


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
