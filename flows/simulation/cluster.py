"""The simulated cluster of a dry run: its virtual clock, hosts, failures, repairs and launcher.

The real flow runs on it, through the real launcher protocol, and writes the real files (``flows.simulation.jobs`` has
what each job writes). The cluster outlives a driver that dies, and learns about the run only from the run directory.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import GEN_CREATED, getgeneratorstate
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from conf import simulation
from conf.schema import Config, FailureRatesConfig, PastFailure, SimulationConfig
from conf.schema.simulation import OF_CLUSTER
from conf.training_rules import EXIT_CODES
from flows.launch.base import Allocation, Handle, Job, JobPlan, Launcher, Status
from flows.launch.local import LocalLauncher
from flows.runtime.driver import settle
from hlatctl.run.errors import HlatctlError, LaunchError, PreflightError, StorageError, TrainingError, dump_error
from hlatctl.run.fold import read_state
from hlatctl.run.following import stays_after
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState

T = TypeVar("T")
#: The course of a simulated job: yields the seconds to pause, and returns the exit code.
Script: TypeAlias = Generator[float, None, int]

#: Start of every dry run, 2026-01-01 00:00 UTC, so that equal dry runs write equal bytes.
START_UNIX_S = 1_767_225_600.0
#: Journal file of the simulated cluster.
CLUSTER_WRITER = "simulation"
TRAIN = "train"
KILLED = 137
#: A person handles these, whatever the restart policy is.
_FOR_A_PERSON = ("nonfinite", "disk_full")


class DriverLostError(BaseException):
    """The driver of a dry run has died, as if by kill -9. It can't be caught as an Exception."""


@dataclass(eq=False)
class _Sleeper:
    """A thread that waits on a virtual clock; ``turn`` is set when it may continue."""

    job: str = ""
    not_before_s: float = 0.0
    late_s: float = 0.0
    turn: threading.Event = field(default_factory=threading.Event)
    lost: bool = False
    gone: bool = False


class VirtualClock:
    """Jumps from one scheduled action to the next.

    Only one thread runs at a time, the one that has the turn. It passes the turn on by waiting, and runs the actions
    that are due until another thread can continue. So a simulation's result doesn't depend on thread scheduling.
    """

    def __init__(self, start_unix_s: float) -> None:
        self._now_s = start_unix_s
        self._agenda: list[tuple[float, int, _Sleeper | Callable[[], None]]] = []
        self._order = itertools.count()
        self._waiting: list[_Sleeper] = []
        self._impatient: deque[_Sleeper] = deque()
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._workers, self._most = 0, 1

    def now_unix_s(self) -> float:
        """Return the virtual Unix time."""
        return self._now_s

    def monotonic_s(self) -> float:
        """Return the virtual Unix time, which never decreases."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        sleeper = _Sleeper()
        self._push(self._now_s + seconds, sleeper)
        self._pass_turn_on(sleeper)

    def wait(self, seconds: float, check: Callable[[], object]) -> None:
        """Let virtual time pass, then check once."""
        self.sleep(seconds)
        check()

    def wait_for_event(self, poll_s: float, job: str = "", has_ended: Callable[[], bool] = lambda: False) -> None:
        """Let virtual time pass until the job is notified, and at least ``poll_s``."""
        sleeper = _Sleeper(job=job, not_before_s=self._now_s + poll_s, late_s=poll_s / 2)
        self._waiting.append(sleeper)
        self._pass_turn_on(sleeper)

    def at(self, when_unix_s: float, action: Callable[[], None]) -> None:
        """Schedule an action."""
        self._push(when_unix_s, action)

    def notify(self, job: str) -> None:
        """Wake the threads that wait for this job or any job, after the mean delay of a poll."""
        woken = [sleeper for sleeper in self._waiting if sleeper.job in ("", job)]
        for sleeper in woken:
            self._waiting.remove(sleeper)
            self._push(max(self._now_s + sleeper.late_s, sleeper.not_before_s), sleeper)

    def beside(self, work: Callable[[], T], *, most: int = 1) -> Future[T]:
        """Queue work; it starts when the thread that has the turn waits, unless ``most`` threads already work."""
        future: Future[T] = Future()
        self._queue.append((future, work))
        self.let_work(most)
        return future

    def let_work(self, most: int) -> None:
        """Start threads for the queued work up to ``most``, as :meth:`beside` does."""
        self._most = most
        for _ in range(min(most - self._workers, len(self._queue))):
            self._workers += 1
            sleeper = _Sleeper()
            self._push(self._now_s, sleeper)
            threading.Thread(target=self._work, args=(sleeper,), name="evaluate", daemon=True).start()

    def lose_driver(self) -> None:
        """End every waiting thread and cancel queued work: the driver's process has died."""
        for future, _ in self._queue:
            future.cancel()
        self._queue.clear()
        asleep = [entry for _, _, entry in self._agenda if isinstance(entry, _Sleeper)] + self._waiting
        self._waiting.clear()
        for sleeper in asleep:
            sleeper.lost = True
            self._push(self._now_s, sleeper)

    def _push(self, when_s: float, entry: _Sleeper | Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when_s, next(self._order), entry))

    def _pass_turn_on(self, sleeper: _Sleeper) -> None:
        """Pass the turn on, and wait for this thread's next one."""
        try:
            if self._advance(sleeper):
                self._await_turn(sleeper)
        finally:
            sleeper.gone = True  # after an interrupt too: it must not get another turn
        if sleeper.lost:
            raise DriverLostError

    def _await_turn(self, sleeper: _Sleeper) -> None:
        try:
            sleeper.turn.wait()
        except BaseException:  # an interrupt: take the turn back from the other thread first
            self._impatient.append(sleeper)
            sleeper.turn.wait()
            raise

    def _advance(self, own: _Sleeper | None) -> bool:
        """Run due actions until a thread can continue; return whether it is another thread."""
        while True:
            if self._impatient:
                entry: _Sleeper | Callable[[], None] = self._impatient.popleft()
            elif self._agenda:
                when_s, _, entry = heapq.heappop(self._agenda)
                self._now_s = max(self._now_s, when_s)
            elif own is None and self._waiting:
                self._push(self._now_s, self._waiting.pop())  # it will find nothing left to wait for
                continue
            else:
                raise RuntimeError("the flow waits, but nothing is left to happen on its simulated cluster")
            if entry is own:
                return False
            if not isinstance(entry, _Sleeper):
                entry()
            elif not entry.gone:
                entry.gone = True
                entry.turn.set()
                return True

    def _work(self, sleeper: _Sleeper) -> None:
        sleeper.turn.wait()
        while self._queue and self._workers <= self._most:
            settle(*self._queue.popleft())
        self._workers -= 1
        self.notify("beside")  # for threads that wait for the results
        self._advance(None)


class Fault(Exception):
    """A failure of a job, or a request to ``stop``; raised inside its script, where it pauses."""

    def __init__(self, kind: str, host: str = "") -> None:
        super().__init__(kind)
        self.kind, self.host = kind, host


class Process:
    """A running script; ``ended`` is called with its exit code."""

    def __init__(self, clock: VirtualClock, script: Script, ended: Callable[[int], None]) -> None:
        self.alive = True
        self._clock, self._script, self._ended = clock, script, ended
        self._pauses = 0
        self._pause(0.0)

    def inject(self, fault: Fault) -> None:
        """Raise a fault in the script now, after starting it if it hasn't started."""
        if self.alive and getgeneratorstate(self._script) == GEN_CREATED:
            self._advance(lambda: next(self._script))
        if self.alive:
            self._advance(lambda: self._script.throw(fault))

    def kill(self) -> None:
        """End it immediately, as if by SIGKILL."""
        if self.alive:
            self._script.close()
            self._end(KILLED)

    def _pause(self, seconds: float) -> None:
        self._pauses += 1
        current = self._pauses

        def wake() -> None:
            if self.alive and self._pauses == current:  # no fault has arrived in the meantime
                self._advance(lambda: next(self._script))

        self._clock.at(self._clock.now_unix_s() + seconds, wake)

    def _advance(self, advance: Callable[[], float]) -> None:
        try:
            self._pause(advance())
        except StopIteration as end:
            self._end(int(end.value))

    def _end(self, code: int) -> None:
        self.alive = False
        self._ended(code)


_S_PER_RATE = 1000 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure, so long after the previous one; ``kind`` is a field of ``FailureRatesConfig``. Some have no host.

    Args:
        place: place of its host among those of the training job at that time; None: it is ``host``.
    """

    kind: str
    after_s: float
    host: str = ""
    place: int | None = None


def drawn(rates: FailureRatesConfig, hosts: tuple[str, ...], numbers: random.Random) -> Iterator[Failure]:
    """Yield failures endlessly: rates per 1,000 node-hours, those of ``OF_CLUSTER`` per 1,000 hours; none if all are 0.

    Args:
        numbers: random numbers for this alone.
    """
    per_s = {kind: float(rate) / _S_PER_RATE for kind, rate in asdict(rates).items()}
    kinds = {kind: rate * (1 if kind in OF_CLUSTER else len(hosts)) for kind, rate in per_s.items()}
    while total_per_s := sum(kinds.values()):
        kind = numbers.choices(list(kinds), list(kinds.values()))[0]
        yield Failure(kind=kind, host=numbers.choice(hosts), after_s=numbers.expovariate(total_per_s))


def replayed(history: Sequence[PastFailure]) -> Iterator[Failure]:
    """Yield failures that have happened, in order of time."""
    before_s = 0.0
    for past in sorted(history, key=lambda past: past.after_s):
        yield Failure(kind=past.kind, after_s=past.after_s - before_s, place=past.node)
        before_s = past.after_s


def hosts_of(config: Config, settings: SimulationConfig) -> tuple[str, ...]:
    """Return the cluster's hosts: those that a job uses, and spare ones."""
    nodes = config.cluster.nodes
    spare = config.cluster.spare_nodes or (settings.spare_nodes if nodes > 1 else 0)
    return tuple(f"simulated-{number}" for number in range(nodes + spare))


#: Returns the course of one job.
JobScript: TypeAlias = "Callable[[SimulatedCluster, Job], Script]"


class SimulatedCluster:
    """The simulated cluster of a run. Its clock starts at the journal's last event.

    ``scripts`` has what each kind of job does, by the first word of the job's name.
    """

    def __init__(self, run: RunPaths, config: Config, scripts: Mapping[str, JobScript]) -> None:
        start_unix_s = read_state(run).last_event_unix_s or START_UNIX_S
        self.run, self.config, self.settings = run, config, simulation.of_run(run)
        self.clock = VirtualClock(start_unix_s)
        self.hosts = hosts_of(config, self.settings)
        self._scripts = scripts
        self.processes: dict[str, Process] = {}
        #: Notify waiting threads after each step, for a sweep that prunes; costs time.
        self.notifies_steps = config.budget.is_limited
        self.driver_restart_s = self.settings.head_restart_s
        #: The time until which each host is broken, or slow.
        self.broken: dict[str, float] = {}
        self.slow: dict[str, float] = {}
        #: The hosts of these that no job gets.
        self._cut_off, self._lost = set[str](), dict[str, str]()
        self._trains_on = self.hosts[: config.cluster.nodes]
        #: The hosts that compute wrong numbers, which nobody knows yet.
        self.wrong: set[str] = set()
        self.no_nodes_until_s = self.disk_full_until_s = start_unix_s
        #: Number of the current driver.
        self.driver = 0
        self._has_driver = True
        #: The newest job of preflight or training has left its imports to the next one.
        self._stayed = False
        #: Attempt and step of the newest copy in the memory of the nodes; None: there is none.
        self.copied: tuple[int, int] | None = None
        self._seed = f"{self.settings.seed}/{start_unix_s}"
        history, numbers = self.settings.history, self.random("failures")
        self._failures = replayed(history) if history else drawn(self.settings.failures, self.hosts, numbers)
        self._repairs = self.random("mending")
        self._draws_failures = False
        if self.settings.maintenance_after_s is not None:
            begins_s = START_UNIX_S + self.settings.maintenance_after_s
            if begins_s > start_unix_s:
                self.clock.at(begins_s, self._maintain)

    def launcher(self) -> Launcher:
        """Return a launcher for the current driver; those of dead drivers do nothing."""
        return SimulatedLauncher(self.config, self)

    def random(self, name: str) -> random.Random:
        """Return random numbers for one purpose, independent of the other purposes."""
        return random.Random(f"{self._seed}/{name}")

    def journal(self, writer: str, attempt: int = 0) -> JournalWriter:
        """Return a journal with the virtual time."""
        return JournalWriter(self.run, writer, attempt, now_unix_s=self.clock.now_unix_s)

    def start(self, job: Job) -> None:
        """Start a simulated job."""
        script = self._scripts[job.name.split("-")[0]]
        if job.name == TRAIN:
            self._trains_on = tuple(self.hosts_for(job))
        self.processes[os.fspath(job.launch_dir / job.name)] = Process(
            self.clock, script(self, job), partial(self._ended, job, exit_file(job.launch_dir, job.name))
        )
        if job.name == TRAIN and not self._draws_failures:
            self._draws_failures = True
            self._schedule_failure()

    def process(self, launch_dir: str, name: str) -> Process | None:
        """Return the process of a job that was started on this cluster, or None."""
        return self.processes.get(os.path.join(launch_dir, name))

    def hosts_for(self, job: Job) -> list[str]:
        """Return the hosts of a job: those that it should avoid are used last, and then those that it waits for."""
        gone = self._cut_off.intersection(self.broken_among(self.hosts))
        usable = [host for host in self.hosts if host not in job.excluded_hosts]
        usable.sort(key=lambda host: (host in gone, host in job.avoided_hosts))
        most = len(set(usable) - gone) if job.all_nodes else 0
        return usable[: max(self.config.cluster.nodes, most)]

    def takes_over(self, job: Job) -> bool:
        """Return whether a job takes over the imports of the job before, by the rules of decision 110."""
        return bool(job.stays) and self._stayed

    def end(self, process: Process) -> None:
        """End a job that does not end by itself; it leaves nothing to the next one."""
        process.kill()
        self._stayed = False

    def forget_copies(self) -> None:
        """Lose the copies in memory with a node, unless a partner has them and a spare node takes its place."""
        nodes = self.config.cluster.nodes
        if nodes == 1 or len(self.hosts) - len(self.broken_among(self.hosts)) < nodes:
            self.copied = None

    def broken_among(self, hosts: Sequence[str]) -> list[str]:
        """Return those of these hosts that are broken now, in the order in which they broke."""
        now_s = self.clock.now_unix_s()
        return [host for host, until_s in self.broken.items() if until_s > now_s and host in hosts]

    def slowdown(self, hosts: list[str]) -> float:
        """Return the factor by which the slowest of these hosts slows a step now."""
        now_s = self.clock.now_unix_s()
        slow = any(until_s > now_s and host in hosts for host, until_s in self.slow.items())
        return self.settings.straggler_factor if slow else 1.0

    def take_out(self, host: str) -> None:
        """Let a host fail until it is repaired."""
        repaired_after_s = self._repairs.expovariate(1 / max(self.settings.repair_s, 1.0))
        self.broken[host] = self.clock.now_unix_s() + repaired_after_s
        self.wrong.discard(host)

    def cut_off(self, host: str) -> None:
        """Let a host be gone until it is repaired; without spare hosts, jobs wait for it."""
        self.take_out(host)
        self._cut_off.add(host)
        gone = self._cut_off.intersection(self.broken_among(self.hosts))
        too_few = self.config.cluster.nodes - (len(self.hosts) - len(gone))
        if too_few > 0:
            back_s = sorted(self.broken[each] for each in gone)[too_few - 1]
            self.no_nodes_until_s = max(self.no_nodes_until_s, back_s)

    def end_with(self, job: Job, log: str, error: HlatctlError | None, lost: str = "") -> None:
        """Write what a job leaves besides its exit code, and note the host that it has lost."""
        self._lost[job.name] = lost
        job.log_dir.mkdir(parents=True, exist_ok=True)
        job.log.write_text(f"simulated: job {job.name}\n{log}", encoding="utf-8")
        if error:
            dump_error(error, job.error_file)

    def resumed_after_s(self, end: HlatctlError, state: RunState) -> float | None:
        """Return the delay after which a person resumes a failed run; None if no simulated failure caused its end."""
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
        failure = next(self._failures, None)
        if failure:
            self.clock.at(self.clock.now_unix_s() + failure.after_s, partial(self._fail, failure))

    def _maintain(self) -> None:
        self._break(Failure(kind="upgrade", host="", after_s=0.0))
        self.no_nodes_until_s = self.clock.now_unix_s() + self.settings.maintenance_s

    def _fail(self, failure: Failure) -> None:
        self._schedule_failure()
        self._break(failure)

    def _break(self, failure: Failure) -> None:
        now_s, settings = self.clock.now_unix_s(), self.settings
        if failure.place is not None:
            failure = dataclasses.replace(failure, host=self._trains_on[failure.place % len(self._trains_on)])
        with self.journal(CLUSTER_WRITER) as journal:
            journal.append("failure_simulated", failure=failure.kind, host=failure.host)
        if failure.kind in ("hardware", "unfit"):
            self.take_out(failure.host)
        elif failure.kind == "node":
            self.cut_off(failure.host)
        elif failure.kind == "flip_memory":
            self.wrong.add(failure.host)
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
            with self.journal(CLUSTER_WRITER) as journal:
                journal.append(kind, what="mlflow", **fields)

        journal_event("tracking_lost", message="simulated: MLflow does not answer; the run continues without it")
        back = partial(journal_event, "tracking_back", events=0)
        self.clock.at(self.clock.now_unix_s() + self.settings.mlflow_outage_s, back)

    def _ended(self, job: Job, file: Path, code: int) -> None:
        if not job.log.is_file():
            self.end_with(job, "", None)
        lost = self._lost.pop(job.name, "")
        file.write_text(f"{code} {lost}\n", encoding="utf-8")
        if job.stays:
            self._stayed = stays_after(job.stays, code) and code != EXIT_CODES["stop"]
        self.clock.notify(job.name)


#: Failures that are raised in the training job.
_FAULTS_OF_TRAINING = ("hardware", "node", "process", "collective_timeout", "hang", "upgrade", "nan", "straggler")
#: Failures without a host.
_EVERYWHERE = ("upgrade", "nan")


def exit_file(launch_dir: str | Path, name: str) -> Path:
    """Return the file of a job's exit code."""
    return Path(launch_dir) / f"{name}.exit_code"


_POLL_S = 0.5


class SimulatedLauncher(Launcher):
    """Simulates jobs instead of running them; without a cluster it only renders them."""

    name = "simulated"

    def __init__(self, config: Config, cluster: SimulatedCluster | None = None) -> None:
        self._cluster = cluster
        self._hosts = cluster.hosts if cluster else hosts_of(config, SimulationConfig())
        self._driver = cluster.driver if cluster else 0

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """Return the hosts of the simulated cluster."""
        return self._hosts

    def render(self, job: Job) -> JobPlan:
        """Return the text that the local launcher would submit."""
        return LocalLauncher().render(job)

    def submit(self, plan: JobPlan) -> Handle:
        """Start the simulated job."""
        if self._cluster is None:
            raise LaunchError(f"job {plan.job.name}: cluster.launcher=simulated simulates jobs only inside a flow")
        handle = self.handle(plan)
        plan.script_path.parent.mkdir(parents=True, exist_ok=True)
        plan.script_path.write_text(plan.script, encoding="utf-8")
        for old in (exit_file(handle.launch_dir, handle.name), plan.job.error_file, plan.job.log):
            old.unlink(missing_ok=True)
        self._cluster.start(plan.job)
        return handle

    def status(self, handle: Handle) -> Status:
        """Return ``running`` while it runs here; then the state by its exit code, or ``lost`` without one.

        After the code, the file names the host that was cut off, as a scheduler does.
        """
        process = self._process(handle)
        if process and process.alive:
            return Status(state="running")
        try:
            ended, *lost = exit_file(handle.launch_dir, handle.name).read_text(encoding="utf-8").split()
            code = int(ended)
        except (OSError, ValueError):
            return Status(state="lost")
        if lost:
            return Status(state="failed", exit_code=code, verdict="node_failed", blamed_hosts=tuple(lost))
        return Status(state="succeeded" if code == 0 else "failed", exit_code=code)

    def cancel(self, handle: Handle, *, grace_s: float) -> None:
        """Ask training to stop, and end any job after ``grace_s``."""
        process, cluster = self._process(handle), self._cluster
        if not (process and cluster) or self._driver != cluster.driver:
            return  # a dead driver cancels nothing
        if not process.alive:
            if handle.name == TRAIN:
                cluster.clock.sleep(cluster.settings.decide_s)
            return
        if grace_s and handle.name == TRAIN:
            process.inject(Fault("stop"))
            deadline_s = cluster.clock.now_unix_s() + grace_s
            while process.alive and cluster.clock.now_unix_s() < deadline_s:
                cluster.clock.sleep(_POLL_S)
        if process.alive:
            cluster.end(process)
            cluster.clock.sleep(cluster.settings.end_hung_s if handle.name == TRAIN else 0.0)

    def allocation(self, job: Job) -> Allocation | None:
        """Return all hosts: the run has the spare ones to itself, as nodes that Slurm keeps for it."""
        if self._cluster is None:
            return None
        if job.name == TRAIN:
            self._cluster.clock.sleep(self._cluster.settings.place_s)
        return Allocation(name=self.name, hosts=self._hosts)

    def dump_stacks(self, handle: Handle) -> str:
        """Do nothing: there are no processes."""
        return "a simulated job has no stacks"

    def _process(self, handle: Handle) -> Process | None:
        return self._cluster.process(handle.launch_dir, handle.name) if self._cluster else None
