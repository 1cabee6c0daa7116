"""`hlatctl resume`: continues a run or a sweep."""

from __future__ import annotations

from hlatctl.cli.amend import Why, make
from hlatctl.cli.common import Changes, ConfigDirs, Detach, RunOrSweepName, RunsDir, announce, find_run, find_sweep
from hlatctl.cli.driving import drive
from hlatctl.run.errors import ConfigError, RunBusyError
from hlatctl.run.lease import driver
from hlatctl.run.paths import RunPaths


def resume(
    run: RunOrSweepName,
    overrides: Changes = None,
    config_dir: ConfigDirs = None,
    why: Why = "",
    detach: Detach = False,
    runs_dir: RunsDir = None,
) -> None:
    """Continue a run or a sweep after a stop or a failure.

    Continues from the newest checkpoint, or re-attaches to a job that is still running. Finished stages and
    evaluations are not repeated. With OVERRIDES, the run's configuration is amended first (see `hlatctl amend`).
    """
    sweep = find_sweep(run, runs_dir)
    if sweep and overrides:
        raise ConfigError(
            f"{overrides[0]}: a sweep's configuration can't change, because its trials are compared",
            hint=f"`hlatctl sweep --extend {sweep.run_id}` adds arms; `hlatctl resume TRIAL key=value` amends a trial",
        )
    paths = sweep or find_run(run, runs_dir)
    if overrides:
        _amend(paths, overrides, why)
    announce(paths)
    drive(paths, detach=detach)


def _amend(run: RunPaths, overrides: list[str], why: str) -> None:
    if holder := driver(run):
        raise RunBusyError(
            f"run {run.run_id}: {holder} drives it", hint=f"`hlatctl amend {run.run_id} {' '.join(overrides)}`"
        )
    make(run, overrides, why=why, resumes=True)
