"""`hlatctl train`: make a run and drive it to its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from hlatctl.cli.common import Detach, Overrides, say
from hlatctl.cli.driving import drive
from hlatctl.run.errors import LaunchError
from hlatctl.run.paths import RunPaths

#: What --dry-run adds: every job is played by the scripted cluster, the stages and the journal are real.
_DRY_RUN_OVERRIDE = "cluster.launcher=mock"
_DETACH_TIMEOUT_S = 60.0
_POLL_S = 0.1


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

    run = pretrain.create(config, argv=sys.argv, run_id=run_id, simulated=dry_run)
    typer.echo(run.run_id)
    sys.stdout.flush()
    if detach:
        start_head(run)
    else:
        drive(run)


def start_head(run: RunPaths) -> None:
    """Drive a run in a process of its own that outlives this one, and return once it does.

    Raises:
        LaunchError: it ended, or did not begin, right away.
    """
    import hlatctl
    from hlatctl.run.lease import head_pid

    log = run.root / "logs" / "head.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    package_root = os.fspath(Path(hlatctl.__file__).parent.parent)
    search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    with log.open("ab") as output:
        head = subprocess.Popen(
            [sys.executable, "-P", "-m", "hlatctl", "resume", run.run_id, "--runs-dir", os.fspath(run.root.parent)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "PYTHONPATH": search_path},
        )  # fmt: skip
    deadline = time.monotonic() + _DETACH_TIMEOUT_S
    while head_pid(run) != head.pid:
        if head.poll() is not None and head.returncode != 0:
            raise LaunchError(f"run {run.run_id}: its process ended with code {head.returncode}", hint=f"see {log}")
        if head.returncode == 0:
            break  # it had nothing left to do
        if time.monotonic() > deadline:
            raise LaunchError(f"run {run.run_id}: not begun after {_DETACH_TIMEOUT_S:g} s", hint=f"see {log}")
        time.sleep(_POLL_S)
    say(f"process {head.pid} drives the run; it is not tied to this terminal")
    say(f"hlatctl status {run.run_id}     how it stands")
    say(f"hlatctl logs {run.run_id} -f    its output")
    say(f"hlatctl stop {run.run_id}       a checkpoint, then the end")
