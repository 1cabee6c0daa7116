"""`hlatctl stop`: asks a run or a sweep to write checkpoints and stop."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import RunOrSweepName, RunsDir, find_run, find_sweep, say, user_name
from hlatctl.report.run_view import view_run, view_sweep
from hlatctl.run.paths import SweepPaths


def stop(
    run: RunOrSweepName,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the run to stop.", min=0)] = 60.0,
    runs_dir: RunsDir = None,
) -> None:
    """Save a checkpoint and stop a run, or all runs of a sweep.

    Works from any machine that shares the runs folder with the driver.
    """
    from flows.control import request_stop

    if swept := find_sweep(run, runs_dir):
        _stop_sweep(swept, wait)
        return
    paths = find_run(run, runs_dir)
    before = view_run(paths)
    if before.at_rest:
        say(f"{paths.run_id}: is already {before.status}")
        return
    if before.driver_elsewhere:
        say(f"{paths.run_id}: its driver is {before.driver_elsewhere}, which reads the request from the run's journal")
    request_stop(paths, by=user_name(), wait_s=wait)
    view = view_run(paths)
    if not view.ended:
        say(f"{paths.run_id}: stop requested; still running after {wait:g} s (`hlatctl status {paths.run_id}`)")
        return
    newest = f"step {max(view.state.checkpoints)}" if view.state.checkpoints else "none"
    say(f"{paths.run_id}: {view.status} at step {view.state.step}; newest checkpoint: {newest}")
    if view.can_resume:
        say(f"hlatctl resume {paths.run_id}   continues the run")


def _stop_sweep(sweep: SweepPaths, wait_s: float) -> None:
    from flows.sweep.control import request_stop

    before, driver = view_sweep(sweep)
    if driver is None and before.status in ("finished", "failed", "stopped") and not before.count("running"):
        say(f"{sweep.run_id}: is already {before.status}")
        return
    state = request_stop(sweep, by=user_name(), wait_s=wait_s)
    still = state.count("running", "stopping")
    if still:
        say(f"{sweep.run_id}: stop requested; {still} trials are still running after {wait_s:g} s")
        return
    say(f"{sweep.run_id}: {state.status}; {state.count('paused')} trials are paused")
    say(f"hlatctl resume {sweep.run_id}   continues the sweep")
