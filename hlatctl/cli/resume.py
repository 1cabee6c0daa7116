"""`hlatctl resume`: continues a run or a sweep."""

from __future__ import annotations

from hlatctl.cli.common import Detach, RunOrSweepName, RunsDir, announce, find_run, find_sweep
from hlatctl.cli.driving import drive


def resume(run: RunOrSweepName, detach: Detach = False, runs_dir: RunsDir = None) -> None:
    """Continue a run or a sweep after a stop or a failure.

    Continues from the newest checkpoint, or re-attaches to a job that is still running. Finished stages and
    evaluations are not repeated.
    """
    paths = find_sweep(run, runs_dir) or find_run(run, runs_dir)
    announce(paths)
    drive(paths, detach=detach)
