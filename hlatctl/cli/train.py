"""`hlatctl train`: make a run and drive it to its end."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hlatctl.cli.common import Detach, Overrides, announce, say
from hlatctl.cli.driving import drive
from hlatctl.run.paths import RunPaths, SweepPaths

#: What --dry-run adds: every job is played by the scripted cluster, the stages and the journal are real.
_DRY_RUN_OVERRIDE = "cluster.launcher=mock"
_SIMULATE = "add --dry-run to simulate it, or see `hlatctl plan` with the same configuration"


def train(
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Go through every stage on a simulated cluster; nothing is trained.")
    ] = False,
    run_id: Annotated[str | None, typer.Option(help="Name of the run.  [default: made from name and time]")] = None,
    detach: Detach = False,
) -> None:
    """Train, evaluate and document a model. Prints the run's id; Ctrl-C stops it with a checkpoint."""
    from conf.compose import compose

    config = compose([*(overrides or []), *([_DRY_RUN_OVERRIDE] if dry_run else [])])
    from flows import pretrain
    from flows.stages.validate import refuse_simulation

    if not dry_run:
        refuse_simulation(config, hint=_SIMULATE)
    run = pretrain.create(config, argv=sys.argv, run_id=run_id)
    announce(run)
    typer.echo(run.run_id)
    sys.stdout.flush()
    if detach:
        start_head(run)
    else:
        drive(run)


def start_head(run: RunPaths) -> None:
    """Drive a run, or a sweep, in a process of its own, and tell how to look after it."""
    from flows.runtime import detached

    head = detached.start_head(run)
    is_sweep = isinstance(run, SweepPaths)
    say(f"process {head.pid} drives the {'sweep' if is_sweep else 'run'}; it is not tied to this terminal")
    say(f"hlatctl status {run.run_id}     how it stands")
    if not is_sweep:  # its trials have logs
        say(f"hlatctl logs {run.run_id} -f    its output")
    say(f"hlatctl stop {run.run_id}       a checkpoint, then the end")
