"""`hlatctl stop`: ask a run to write a checkpoint and end."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import RunName, RunsDir, find_run, find_sweep, look, say, user_name
from hlatctl.run.paths import SweepPaths


def stop(
    run: RunName,
    wait: Annotated[float, typer.Option(help="Seconds to wait until it has stopped.", min=0)] = 60.0,
    runs_dir: RunsDir = None,
) -> None:
    """Stop a run, or all of a sweep's, with checkpoints.

    Works from any terminal of the machine that drives it.
    """
    from flows.control import request_stop

    if swept := find_sweep(run, runs_dir):
        _stop_sweep(swept, wait)
        return
    found = find_run(run, runs_dir)
    before = look(found)
    job_ended = before.state.attempt is None or before.state.attempt.ended_unix_s is not None
    if before.ended and job_ended and before.status in ("finished", "stopped"):
        say(f"{found.run_id}: is {before.status} already")
        return
    request_stop(found, by=user_name(), wait_s=wait)
    view = look(found)
    if not view.ended:
        say(f"{found.run_id}: asked to stop; still busy after {wait:g} s (hlatctl status {found.run_id})")
        return
    newest = max(view.state.checkpoints, default=0)
    say(f"{found.run_id}: {view.status} at step {view.state.step}; newest checkpoint: step {newest or 'none'}")
    say(f"hlatctl resume {found.run_id}   goes on with it")


def _stop_sweep(sweep: SweepPaths, wait_s: float) -> None:
    from flows.sweep.control import request_stop

    state = request_stop(sweep, by=user_name(), wait_s=wait_s)
    still = state.count("running", "stopping")
    if still:
        say(f"{sweep.run_id}: asked to stop; {still} trials are still busy after {wait_s:g} s")
        return
    say(f"{sweep.run_id}: {state.status}; {state.count('paused')} trials go on with hlatctl resume {sweep.run_id}")
