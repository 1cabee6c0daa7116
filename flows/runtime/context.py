"""What the stages of one flow share: the run, its configuration, its journal, its launcher and who watches."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from conf import environment
from conf.schema import Config
from flows.launch.base import Handle, Job, Launcher
from flows.recovery import failure_causes, node_ledger
from flows.runtime.clock import Clock, RealClock
from flows.runtime.observer import Observer, SilentObserver
from flows.runtime.signals import Signals
from hlatctl.run.errors import HlatctlError, StoppedError, StorageError
from hlatctl.run.fold import apply
from hlatctl.run.journal import FLOW_WRITER, JournalTail, JournalWriter
from hlatctl.run.paths import RunPaths, cache_dir, nodes_file
from hlatctl.run.state import RunState

T = TypeVar("T")

#: How often a wait looks for a request to stop, or for room on the disk.
_POLL_S = 0.5


class World(Protocol):
    """What a flow knows of the simulated cluster that it runs on."""

    #: Whoever waits for news is woken at each step, too.
    steps_are_news: bool

    @property
    def clock(self) -> Clock:
        """The virtual clock."""

    def launcher(self) -> Launcher:
        """A launcher for the driver that runs now."""

    def resumed_after_s(self, end: HlatctlError, state: RunState) -> float | None:
        """After how long somebody resumes a run that has ended so; None if nobody does."""

    def pass_without_head(self, seconds: float) -> None:
        """Let time pass in which nothing drives the run."""


class FlowContext:
    """One flow's surroundings. Its journal and its state may be used from several threads.

    Args:
        run: the run directory.
        config: the run's own, or another in its place.
        launcher: of its jobs.
        observer: whoever watches.
        writer: of the journal; a flow beside the one that drives the run has its own.
        heeds_stop: a request to stop the run ends this flow's jobs.
        world: that a simulation plays in; None in real life.
    """

    def __init__(
        self,
        run: RunPaths,
        config: Config,
        launcher: Launcher,
        observer: Observer | None = None,
        *,
        writer: str = FLOW_WRITER,
        heeds_stop: bool = True,
        world: World | None = None,
    ) -> None:
        self.run, self.config, self.launcher = run, config, launcher
        self.heeds_stop = heeds_stop
        self.world = world
        self.clock: Clock = world.clock if world else RealClock()
        self.observer = observer or SilentObserver()
        self.state = RunState()
        #: Further places where messages go, such as Prefect's log.
        self.message_sinks: list[Callable[[str], None]] = []
        #: Set when the flow ends early: background work gives up.
        self.cancelled = threading.Event()
        self.signals = Signals()
        self._tail = JournalTail(run)
        self._lock = threading.RLock()
        self._journal = JournalWriter(run, writer, now_unix_s=self.clock.now_unix_s)
        self.refresh()

    def event(self, kind: str, *, attempt: int | None = None, **fields: Any) -> None:
        """Journal an event, durably, and fold it into the state."""
        with self._lock:
            newest = self.state.attempt
            self._journal.attempt = attempt if attempt is not None else (newest.number if newest else 0)
            # Nobody goes on with a rehearsal after a power cut, and it must not wait for a disk.
            self._tail.add(self._journal.append(kind, durable=self.world is None, **fields), self._journal.path.stem)
            self.refresh()

    def require_journal(self) -> None:
        """Wait until the journal holds every event so far, where what follows relies on them.

        Raises:
            StoppedError: somebody has asked the run to stop.
        """
        self.when_there_is_room(self._check_written)

    def when_there_is_room(self, work: Callable[[], T]) -> T:
        """Do what needs disk space; while the disk is full, wait and try again.

        Raises:
            StoppedError: somebody has asked the run to stop.
            StorageError: it failed for another reason than a full disk.
        """
        told = False
        while True:
            try:
                return work()
            except StorageError as error:
                if not failure_causes.is_full(error.message):
                    raise
                if not told:
                    self.message(f"waiting until there is room on the disk: {error.message}")
                told = True
            self.check_stop()
            self.clock.wait_for_news(_POLL_S)

    def look(self) -> RunState:
        """Refresh; only the thread that drives the flow also shows it to the observer."""
        return self.watch() if threading.current_thread() is threading.main_thread() else self.refresh()

    def check_stop(self) -> None:
        """Raise StoppedError if somebody has asked the run to stop, or this flow ends early."""
        if (self.look().stop_requested and self.heeds_stop) or self.cancelled.is_set():
            run_id = self.run.run_id
            raise StoppedError(f"run {run_id}: stopped on request", hint=f"hlatctl resume {run_id}")

    def pause(self, seconds: float) -> None:
        """Wait so long.

        Raises:
            StoppedError: somebody has asked the run to stop.
        """
        self.check_stop()
        self.clock.wait(seconds, self.check_stop)

    def _check_written(self) -> None:
        self._journal.flush()
        if self._journal.unwritten:
            raise StorageError(f"{self._journal.path}: can't be written ({os.strerror(errno.ENOSPC)})")

    def refresh(self) -> RunState:
        """Fold what all writers have added to the journal."""
        with self._lock:
            if self._journal.unwritten:
                self._journal.flush()
            for event in self._tail.read_new():
                apply(self.state, event)
            return self.state

    def watch(self) -> RunState:
        """Refresh, and show it to the observer; also where a request to end is noticed that has been lost."""
        self.signals.check()
        state = self.refresh()
        self.observer.update(state, self.config)
        return state

    def message(self, text: str) -> None:
        """Tell whoever watches."""
        self.observer.message(text)
        for sink in self.message_sinks:
            sink(text)

    def close(self) -> None:
        """Release the journal."""
        self._journal.close()

    def job(
        self,
        name: str,
        *argv: str,
        attempt: int = 0,
        distributed: bool = False,
        each_node: bool = False,
        env: dict[str, str] | None = None,
        wrapper: tuple[str, ...] = (),
    ) -> Job:
        """A job of this run; see :func:`make_job`. It is kept from hosts that the node ledger leaves out."""
        job = make_job(
            self.config,
            self.run,
            name,
            *argv,
            attempt=attempt,
            distributed=distributed,
            each_node=each_node,
            env=env,
            wrapper=wrapper,
        )
        return dataclasses.replace(job, excluded_hosts=self.place().left_out)

    @property
    def ledger(self) -> Path:
        """Of the nodes; a rehearsal's own is in its run directory, so that no other changes its course."""
        return nodes_file(self.run.root if self.world else Path(self.config.runs_dir))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where this run's jobs can be placed."""
        return self.launcher.hosts(self.config.cluster.nodes)

    def training_lives(self) -> bool:
        """Whether the newest attempt's job runs now, whoever started it."""
        return live_training(self.state, self.launcher) is not None

    def place(self) -> node_ledger.Placement:
        """Which hosts are left out now."""
        entries = node_ledger.read(self.ledger)
        return node_ledger.place(self.hosts, self.config.cluster.nodes, entries, self.clock.now_unix_s())

    def rejected_hosts(self) -> set[str]:
        """Those that have failed their newest preflight, not long ago."""
        rejected = node_ledger.rejected(node_ledger.read(self.ledger), self.clock.now_unix_s())
        return set(rejected).intersection(self.hosts)

    def hold_against(self, hosts: Iterable[str], kind: node_ledger.Kind, detail: str, *, attempt: int = 0) -> None:
        """Enter what was seen of hosts into the node ledger; the run goes on if the ledger can't be written."""
        seen = node_ledger.Entry(
            time_unix_s=self.clock.now_unix_s(),
            host="",
            kind=kind,
            run_id=self.run.run_id,
            attempt=attempt,
            detail=detail,
        )
        try:
            node_ledger.record(self.ledger, [dataclasses.replace(seen, host=host) for host in hosts])
        except StorageError as error:
            self.message(f"nodes: {kind} not recorded; {error.message}")

    def job_beside_training(self, name: str, *argv: str) -> Job:
        """A single process that runs while training goes on and must not slow it."""
        return dataclasses.replace(self.job(name, *argv), beside_training=True)


def live_training(state: RunState, launcher: Launcher) -> Handle | None:
    """Return the handle of the newest attempt's job if that job runs now, whoever started it."""
    attempt = state.attempt
    if attempt is None or attempt.ended_unix_s is not None:
        return None
    handle = Handle.from_json(attempt.handle)
    return None if launcher.status(handle).ended else handle


def cache_root(config: Config) -> Path:
    """Prepared corpora and compiled graphs, shared by runs; what a mock pretends to have made stays apart."""
    root = cache_dir(Path(config.runs_dir))
    return root / "mock" if is_mock(config) else root


def is_mock(config: Config) -> bool:
    """Nothing is really run: the flow is rehearsed."""
    return config.cluster.launcher == "mock"


def make_job(
    config: Config,
    run: RunPaths,
    name: str,
    *argv: str,
    attempt: int = 0,
    distributed: bool = False,
    each_node: bool = False,
    env: dict[str, str] | None = None,
    wrapper: tuple[str, ...] = (),
) -> Job:
    """A job of a run; pure.

    Args:
        config: the run's.
        run: its directory, which need not exist.
        name: names its files.
        argv: what follows ``python``, such as ``-m``, ``trainer.convert.export``, ….
        attempt: whose folders its files go to; 0 is everything that is not a training attempt.
        distributed: one process per slot of the cluster, by torchrun, with the environment that the configuration
            gives training; otherwise a single process.
        each_node: that single process once on every node.
        env: variables besides the common ones.
        wrapper: see :class:`flows.launch.base.Job`.
    """
    cluster = config.cluster
    threads = cluster.threads_per_process * (1 if distributed else cluster.processes_per_node)
    return Job(
        name=name,
        run_dir=run.root,
        argv=argv,
        launch_dir=run.launch(attempt),
        log_dir=run.logs(attempt),
        env={
            "OMP_NUM_THREADS": str(threads),
            # The working directory must not shadow our packages: a folder named eval/ or conf/ is common.
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **(environment.variables(config) if distributed else {}),
            **(env or {}),
        },
        unset=environment.unset(config) if distributed else (),
        wrapper=wrapper,
        nodes=cluster.nodes,
        processes_per_node=cluster.processes_per_node if distributed else 0,
        each_node=each_node,
    )
