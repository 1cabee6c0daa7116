"""The simulated cluster of one run: its hosts, its jobs, what breaks, and who mends it.

It outlives a head that dies. What it knows of the run lies in the run directory, as for everybody else.
"""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

from conf.schema import Config
from flows.launch.base import Job, Launcher
from flows.runtime.clock import VirtualClock
from flows.simulation.checkpoints import Kept
from flows.simulation.failures import Failure, Failures
from flows.simulation.process import Process, Script, Struck
from hlatctl.run.errors import HlatctlError, PreflightError, StorageError, TrainingError, dump_error
from hlatctl.run.journal import JournalWriter, read_events
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState

#: When every rehearsal begins, 2026-01-01 00:00 UTC: so that two of them differ in nothing.
START_UNIX_S = 1_767_225_600.0
#: Journal file of what the world does to the run.
WORLD_WRITER = "world"
TRAIN = "train"
#: A person looks after these, whatever the restart policy is.
_FOR_A_PERSON = ("nonfinite", "disk_full")


def hosts_of(config: Config) -> tuple[str, ...]:
    """The cluster's hosts: those that a job takes, and the spare ones."""
    nodes = config.cluster.nodes
    return tuple(f"mock-{number}" for number in range(nodes + (config.rehearsal.spare_nodes if nodes > 1 else 0)))


class World:
    """What there is around a rehearsed run.

    Args:
        run: its directory; what its journal tells of is past.
        config: of the run.
    """

    def __init__(self, run: RunPaths, config: Config) -> None:
        start_unix_s = max((event["time_unix_s"] for event in read_events(run)), default=START_UNIX_S)
        self.run, self.config, self.settings = run, config, config.rehearsal
        self.clock = VirtualClock(start_unix_s)
        self.hosts = hosts_of(config)
        self.checkpoints = Kept(run, config)
        self.processes: dict[str, Process] = {}
        #: Whether the flow looks at every step event, which takes time: a sweep's, which may prune, does.
        self.notifies_steps = False
        #: Until when each host is broken, or slow.
        self.broken: dict[str, float] = {}
        self.slow: dict[str, float] = {}
        self.no_nodes_until_s = self.disk_full_until_s = start_unix_s
        self.head = 0
        self._driver_is_there = True
        self._seed = f"{config.rehearsal.seed}/{start_unix_s}"
        self._failures = Failures(self.settings.failures, self.hosts, self.random("failures"))
        self._mending = self.random("mending")
        self._breaks = False

    def launcher(self) -> Launcher:
        """A launcher for the driver that runs now; one of a driver that has died does nothing any more."""
        from flows.simulation.mock import MockLauncher

        return MockLauncher(self.config, self)

    def random(self, name: str) -> random.Random:
        """Random numbers of their own for each purpose: more of one does not change the others."""
        return random.Random(f"{self._seed}/{name}")

    def journal(self, writer: str, attempt: int = 0) -> JournalWriter:
        """A journal whose time is the world's."""
        return JournalWriter(self.run, writer, attempt, now_unix_s=self.clock.now_unix_s)

    def start(self, job: Job, script: Script) -> None:
        """Begin to play a job."""
        self.processes[os.fspath(job.launch_dir / job.name)] = Process(
            self.clock, script, partial(self._ended, job, exit_file(job.launch_dir, job.name))
        )
        if job.name == TRAIN and not self._breaks:
            self._breaks = True
            self._await_failure()

    def process(self, launch_dir: str, name: str) -> Process | None:
        """The job that was started there, if this process has."""
        return self.processes.get(os.path.join(launch_dir, name))

    def hosts_for(self, job: Job) -> list[str]:
        """Where a job's nodes are."""
        return [host for host in self.hosts if host not in job.excluded_hosts][: self.config.cluster.nodes]

    def is_broken(self, host: str) -> bool:
        """Whether a host can't be used now."""
        return self.broken.get(host, 0.0) > self.clock.now_unix_s()

    def slowdown(self, hosts: list[str]) -> float:
        """How much longer a step of a job on these hosts takes now: everybody waits for the slowest."""
        slow = any(self.slow.get(host, 0.0) > self.clock.now_unix_s() for host in hosts)
        return self.settings.straggler_factor if slow else 1.0

    def end_with(self, job: Job, log: str, error: HlatctlError | None) -> None:
        """What a job leaves at its end, besides its exit code."""
        job.log_dir.mkdir(parents=True, exist_ok=True)
        job.log.write_text(f"simulated: job {job.name}\n{log}", encoding="utf-8")
        if error:
            dump_error(error, job.error_file)

    def resumed_after_s(self, end: HlatctlError, state: RunState) -> float | None:
        """When a person resumes the run that has failed so; None: nobody does, for nothing simulated is to blame."""
        cause = state.attempt.cause if state.attempt else ""
        unfit = isinstance(end, PreflightError) and any(map(self.is_broken, self.hosts))
        given_up = isinstance(end, TrainingError | StorageError) and (
            cause in _FOR_A_PERSON or not self.config.recovery.enabled
        )
        return self._by_a_person() if unfit or given_up else None

    def pass_without_driver(self, seconds: float) -> None:
        """Let time pass in which nobody drives the run."""
        self._driver_is_there = False
        self.clock.sleep(seconds)
        self._driver_is_there = True

    def _by_a_person(self) -> float:
        """Somebody comes, frees the disk and replaces what is broken."""
        after_s = self._mending.expovariate(1 / self.settings.person_s) if self.settings.person_s else 0.0
        self.clock.at(self.clock.now_unix_s() + after_s, self._mend)
        return after_s

    def _mend(self) -> None:
        self.broken.clear()
        self.disk_full_until_s = self.clock.now_unix_s()

    def _await_failure(self) -> None:
        failure = self._failures.next()
        if failure:
            self.clock.at(self.clock.now_unix_s() + failure.after_s, partial(self._break, failure))

    def _break(self, failure: Failure) -> None:
        self._await_failure()
        now_s, settings = self.clock.now_unix_s(), self.settings
        with self.journal(WORLD_WRITER) as journal:
            journal.append("failure_simulated", failure=failure.kind, host=failure.host)
        if failure.kind in ("hardware", "unfit"):
            self.broken[failure.host] = now_s + self._mending.expovariate(1 / max(settings.repair_s, 1.0))
        elif failure.kind == "straggler":
            self.slow[failure.host] = now_s + settings.straggler_s
        elif failure.kind == "upgrade":
            self.no_nodes_until_s = now_s + settings.upgrade_s
        elif failure.kind == "disk_full":
            self.disk_full_until_s = now_s + self._mending.expovariate(1 / max(settings.person_s, 1.0))
        elif failure.kind == "head_crash" and self._driver_is_there:
            self.head += 1
            self.clock.lose_driver()
        elif failure.kind == "mlflow_outage":
            self._lose_mlflow()
        if failure.kind in _STRIKES_TRAINING:
            self._strike(failure)

    def _strike(self, failure: Failure) -> None:
        for process in [process for key, process in self.processes.items() if Path(key).name == TRAIN]:
            process.strike(Struck(failure.kind, "" if failure.kind in _EVERYWHERE else failure.host))

    def _lose_mlflow(self) -> None:
        def tell(kind: str, **fields: Any) -> None:
            with self.journal(WORLD_WRITER) as journal:
                journal.append(kind, what="mlflow", **fields)

        tell("tracking_lost", message="simulated: MLflow does not answer; the run goes on")
        self.clock.at(self.clock.now_unix_s() + self.settings.mlflow_outage_s, partial(tell, "tracking_back", events=0))

    def _ended(self, job: Job, file: Path, code: int) -> None:
        if not job.log.is_file():
            self.end_with(job, "", None)
        file.write_text(f"{code}\n", encoding="utf-8")
        self.clock.notify(job.name)


#: What reaches the processes that train; the rest shows elsewhere.
_STRIKES_TRAINING = ("hardware", "collective_timeout", "hang", "upgrade", "nan", "straggler")
#: These have no place.
_EVERYWHERE = ("upgrade", "nan")


def exit_file(launch_dir: str | Path, name: str) -> Path:
    """Where a job leaves its exit code."""
    return Path(launch_dir) / f"{name}.exit_code"
