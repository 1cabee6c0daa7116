"""The simulated cluster of one run: its hosts, its jobs, their failures and repairs.

It outlives a driver that dies. It learns about the run only from the run directory.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from conf.schema import Config
from flows.launch.base import Job, Launcher
from flows.runtime.clock import VirtualClock
from flows.simulation.checkpoints import Kept
from flows.simulation.failures import Failure, Failures
from flows.simulation.process import Fault, Process, Script
from hlatctl.run.errors import HlatctlError, PreflightError, StorageError, TrainingError, dump_error
from hlatctl.run.fold import read_state
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState

#: Start of every dry run, 2026-01-01 00:00 UTC, so that equal dry runs write equal bytes.
START_UNIX_S = 1_767_225_600.0
#: Journal file of the simulated cluster.
WORLD_WRITER = "world"
TRAIN = "train"
#: A person handles these, whatever the restart policy is.
_FOR_A_PERSON = ("nonfinite", "disk_full")


def hosts_of(config: Config) -> tuple[str, ...]:
    """Return the cluster's hosts: those that a job uses, and spare ones."""
    nodes = config.cluster.nodes
    spare = config.cluster.spare_nodes or (config.rehearsal.spare_nodes if nodes > 1 else 0)
    return tuple(f"mock-{number}" for number in range(nodes + spare))


class World:
    """The simulated cluster of a run. Its clock starts at the journal's last event."""

    def __init__(self, run: RunPaths, config: Config) -> None:
        start_unix_s = read_state(run).last_event_unix_s or START_UNIX_S
        self.run, self.config, self.settings = run, config, config.rehearsal
        self.clock = VirtualClock(start_unix_s)
        self.hosts = hosts_of(config)
        self.checkpoints = Kept(run, config)
        self.processes: dict[str, Process] = {}
        #: Notify waiting threads after each step, for a sweep that prunes; costs time.
        self.notifies_steps = False
        #: The time until which each host is broken, or slow.
        self.broken: dict[str, float] = {}
        self.slow: dict[str, float] = {}
        self.no_nodes_until_s = self.disk_full_until_s = start_unix_s
        #: Number of the driver that runs now.
        self.driver = 0
        self._has_driver = True
        self._seed = f"{config.rehearsal.seed}/{start_unix_s}"
        self._failures = Failures(self.settings.failures, self.hosts, self.random("failures"))
        self._repairs = self.random("mending")
        self._draws_failures = False

    def launcher(self) -> Launcher:
        """Return a launcher for the driver that runs now; those of dead drivers do nothing."""
        from flows.simulation.mock import MockLauncher

        return MockLauncher(self.config, self)

    def random(self, name: str) -> random.Random:
        """Return random numbers for one purpose, independent of the other purposes."""
        return random.Random(f"{self._seed}/{name}")

    def journal(self, writer: str, attempt: int = 0) -> JournalWriter:
        """Return a journal with the virtual time."""
        return JournalWriter(self.run, writer, attempt, now_unix_s=self.clock.now_unix_s)

    def start(self, job: Job, script: Script) -> None:
        """Start a simulated job."""
        self.processes[os.fspath(job.launch_dir / job.name)] = Process(
            self.clock, script, partial(self._ended, job, exit_file(job.launch_dir, job.name))
        )
        if job.name == TRAIN and not self._draws_failures:
            self._draws_failures = True
            self._schedule_failure()

    def process(self, launch_dir: str, name: str) -> Process | None:
        """Return the process of a job that was started here, or None."""
        return self.processes.get(os.path.join(launch_dir, name))

    def hosts_for(self, job: Job) -> list[str]:
        """Return the hosts of a job."""
        return [host for host in self.hosts if host not in job.excluded_hosts][: self.config.cluster.nodes]

    def broken_among(self, hosts: Sequence[str]) -> list[str]:
        """Return those of these hosts that are broken now, in the order in which they broke."""
        now_s = self.clock.now_unix_s()
        return [host for host, until_s in self.broken.items() if until_s > now_s and host in hosts]

    def slowdown(self, hosts: list[str]) -> float:
        """Return the factor by which the slowest of these hosts slows a step now."""
        now_s = self.clock.now_unix_s()
        slow = any(until_s > now_s and host in hosts for host, until_s in self.slow.items())
        return self.settings.straggler_factor if slow else 1.0

    def end_with(self, job: Job, log: str, error: HlatctlError | None) -> None:
        """Write what a job leaves besides its exit code."""
        job.log_dir.mkdir(parents=True, exist_ok=True)
        job.log.write_text(f"simulated: job {job.name}\n{log}", encoding="utf-8")
        if error:
            dump_error(error, job.error_file)

    def resumed_after_s(self, end: HlatctlError, state: RunState) -> float | None:
        """Return after how long a person resumes a failed run; None: never, because no simulated failure caused it."""
        cause = state.attempt.cause if state.attempt else ""
        # A host may have been repaired while the driver waited for an evaluation.
        unfit = isinstance(end, PreflightError) and bool(self.broken)
        given_up = isinstance(end, TrainingError | StorageError) and (
            cause in _FOR_A_PERSON or not self.config.recovery.enabled
        )
        return self._by_a_person() if unfit or given_up else None

    def pass_without_driver(self, seconds: float) -> None:
        """Let time pass without a driver."""
        self._has_driver = False
        self.clock.sleep(seconds)
        self._has_driver = True

    def _by_a_person(self) -> float:
        """Schedule a person who frees the disk and replaces broken hosts; return the delay."""
        after_s = self._repairs.expovariate(1 / self.settings.person_s) if self.settings.person_s else 0.0
        self.clock.at(self.clock.now_unix_s() + after_s, self._repair)
        return after_s

    def _repair(self) -> None:
        self.broken.clear()
        self.disk_full_until_s = self.clock.now_unix_s()

    def _schedule_failure(self) -> None:
        failure = self._failures.next()
        if failure:
            self.clock.at(self.clock.now_unix_s() + failure.after_s, partial(self._break, failure))

    def _break(self, failure: Failure) -> None:
        self._schedule_failure()
        now_s, settings = self.clock.now_unix_s(), self.settings
        with self.journal(WORLD_WRITER) as journal:
            journal.append("failure_simulated", failure=failure.kind, host=failure.host)
        if failure.kind in ("hardware", "unfit"):
            self.broken[failure.host] = now_s + self._repairs.expovariate(1 / max(settings.repair_s, 1.0))
        elif failure.kind == "straggler":
            self.slow[failure.host] = now_s + settings.straggler_s
        elif failure.kind == "upgrade":
            self.no_nodes_until_s = now_s + settings.upgrade_s
        elif failure.kind == "disk_full":
            self.disk_full_until_s = now_s + self._repairs.expovariate(1 / max(settings.person_s, 1.0))
        elif failure.kind == "head_crash" and self._has_driver:
            self.driver += 1
            self.clock.lose_driver()
        elif failure.kind == "mlflow_outage":
            self._lose_mlflow()
        if failure.kind in _FAULTS_OF_TRAINING:
            self._inject(failure)

    def _inject(self, failure: Failure) -> None:
        for process in [process for key, process in self.processes.items() if Path(key).name == TRAIN]:
            process.inject(Fault(failure.kind, "" if failure.kind in _EVERYWHERE else failure.host))

    def _lose_mlflow(self) -> None:
        def journal_event(kind: str, **fields: Any) -> None:
            with self.journal(WORLD_WRITER) as journal:
                journal.append(kind, what="mlflow", **fields)

        journal_event("tracking_lost", message="simulated: MLflow does not answer; the run continues without it")
        back = partial(journal_event, "tracking_back", events=0)
        self.clock.at(self.clock.now_unix_s() + self.settings.mlflow_outage_s, back)

    def _ended(self, job: Job, file: Path, code: int) -> None:
        if not job.log.is_file():
            self.end_with(job, "", None)
        file.write_text(f"{code}\n", encoding="utf-8")
        self.clock.notify(job.name)


#: Failures that are raised in the training job.
_FAULTS_OF_TRAINING = ("hardware", "collective_timeout", "hang", "upgrade", "nan", "straggler")
#: Failures of no host.
_EVERYWHERE = ("upgrade", "nan")


def exit_file(launch_dir: str | Path, name: str) -> Path:
    """Return the file of a job's exit code."""
    return Path(launch_dir) / f"{name}.exit_code"
