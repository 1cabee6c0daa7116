"""Where a driver runs: in this process, in the background, or as a job of the cluster (``--detach``, ``--driver``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import say
from hlatctl.driver_job import driver_job
from hlatctl.run.errors import ConfigError, RunBusyError
from hlatctl.run.lease import driver
from hlatctl.run.paths import RunPaths, SweepPaths

if TYPE_CHECKING:
    from conf.schema import ClusterConfig


Detach = Annotated[bool, typer.Option("--detach", help="Run in the background and return immediately.")]
DriverAs = Annotated[
    str | None,
    typer.Option(
        "--driver",
        metavar="slurm",
        help="Run the driver as a job of the cluster, which replaces itself before its time limit, and return.",
    ),
]
#: Submits the driver of a run or a sweep as a job, and returns the job's name.
Submit = Callable[[RunPaths], str]


def detach_driver(run: RunPaths) -> None:
    """Start a run's driver in the background."""
    from flows.runtime import programs

    process = programs.start_driver(run)
    say(f"the {what_is(run)}'s driver is process {process.pid}; it continues if this terminal closes")
    _follow(run)


def _follow(run: RunPaths) -> None:
    say(f"hlatctl status {run.run_id}     shows its state")
    if not isinstance(run, SweepPaths):  # its trials have logs
        say(f"hlatctl logs {run.run_id} -f    prints its output")
    say(f"hlatctl stop {run.run_id}       stops it with a checkpoint")


def submit_of(
    cluster: ClusterConfig,
    name: str | None,
    *,
    detach: bool = False,
    evaluates: Sequence[str] = (),
    instead: str = "use --detach to run the driver in the background",
) -> Submit | None:
    """Return what submits the driver that ``--driver`` names, after checking its job; None without that option.

    Args:
        evaluates: words of the `hlatctl eval` that the job runs; empty: it drives the run or the sweep.
        instead: what to do where the driver can't be a job, for a hint.
    """
    if name is None:
        return None
    if detach:
        raise ConfigError(f"--driver={name}: the driver can't also run here in the background", hint="omit --detach")
    from flows.launch.base import drivers_for

    drivers = drivers_for(name)
    if name != cluster.launcher:
        if cluster.jobs_run == "nowhere":
            raise ConfigError(f"--driver={name}: a simulation starts no jobs", hint="omit --driver")
        raise ConfigError(
            f"--driver={name}: with cluster.launcher={cluster.launcher}, the run's jobs would start inside the "
            "driver's job",
            hint=instead if evaluates else f"add cluster={name}, or {instead}",
        )
    drivers.check(cluster)

    def submit(run: RunPaths) -> str:
        place = run.evaluator_job if evaluates else run.driver_job
        words = evaluates or ("resume", run.run_id)
        return drivers.submit(place, (*words, "--yes", "--runs-dir", os.fspath(run.root.parent)), cluster)

    return submit


def submit_driver(run: RunPaths, submit: Submit) -> None:
    """Submit the driver of a run or a sweep that has none.

    Raises:
        RunBusyError: a process drives it.
    """
    if busy := driver(run):
        raise RunBusyError(f"{what_is(run)} {run.run_id}: {busy} drives it", hint=f"`hlatctl status {run.run_id}`")
    say(f"the {what_is(run)}'s driver is {submit(run)}; this command may end now, and so may the login session")
    _follow(run)


def submit_evaluator(run: RunPaths, submit: Submit) -> None:
    """Submit a job that evaluates a run."""
    say(f"the evaluation's driver is {submit(run)}; this command may end now, and so may the login session")
    say(f"hlatctl status {run.run_id}     shows its state")
    say(f"hlatctl stop {run.run_id}       stops it; finished tasks are kept")


def job_rows(run: RunPaths) -> Iterator[tuple[str, str]]:
    """Yield the name and the state of the jobs that drive or evaluate a run or a sweep."""
    for name, place in (("driver's job", run.driver_job), ("evaluation's job", run.evaluator_job)):
        if text := job_text(place):
            yield name, text


def job_text(place: Path) -> str:
    """Return the state of a chain of jobs; empty if there is none."""
    if driver_job(place) is None:
        return ""
    from flows.control import job_text as text_of

    return text_of(place)


def what_is(run: RunPaths) -> str:
    """Return what a folder is, for messages."""
    return "sweep" if isinstance(run, SweepPaths) else "run"
