"""What the stages of one flow share: the run, its configuration, journal, launcher and observer."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

from conf import environment
from conf.devices import DEVICES
from conf.of_run import of_run
from conf.registries import LAUNCHERS
from conf.schema import Config
from flows.launch.base import Handle, Job, Launcher, launcher_for
from flows.recovery import node_ledger
from flows.runtime import spending
from flows.runtime.driver import Clock, DriverLog, Observer, RealClock, Signals, SilentObserver
from hlatctl.driver_job import CHAIN_ENV
from hlatctl.run import processes
from hlatctl.run.errors import DISK_FULL, CheckpointError, HlatctlError, StoppedError, StorageError
from hlatctl.run.fold import KEEP_BYTES, apply, follow, read_state
from hlatctl.run.journal import FLOW_WRITER, JournalWriter
from hlatctl.run.lease import check_driver
from hlatctl.run.paths import RunPaths, cache_dir, nodes_file
from hlatctl.run.state import RunState

T = TypeVar("T")


class JobOptions(TypedDict, total=False):
    """Options of :func:`make_job`."""

    distributed: bool
    each_node: bool
    env: dict[str, str]
    wrapper: tuple[str, ...]


#: Seconds between checks for a request to stop, or for free disk space.
_POLL_S = 0.5


class Simulation(Protocol):
    """The simulated cluster, as a flow uses it."""

    #: Notify waiting threads after each step too.
    notifies_steps: bool
    #: Seconds from the death of a driver to the start of the next one.
    driver_restart_s: float

    @property
    def clock(self) -> Clock:
        """The virtual clock."""

    def launcher(self) -> Launcher:
        """A launcher for the current driver."""

    def resumed_after_s(self, end: HlatctlError, state: RunState) -> float | None:
        """Return the delay after which a person resumes a run that ended with this error; None: never."""

    def pass_without_driver(self, seconds: float) -> None:
        """Let time pass without a driver."""


class FlowContext:
    """The context of one flow. Several threads may use its journal and its state.

    Args:
        config: the run's configuration, or another one in its place.
        writer: writer of the journal; each flow of a run has its own.
        heeds_stop: a request to stop the run ends this flow's jobs.
        simulation: the simulated cluster of a dry run; None in a real run.
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
        simulation: Simulation | None = None,
    ) -> None:
        self.run, self.config, self.launcher = run, config, launcher
        self.heeds_stop = heeds_stop
        self.simulation = simulation
        self.clock: Clock = simulation.clock if simulation else RealClock()
        self.observer = observer or SilentObserver()
        self.state, self._tail = follow(run)
        self._kept_bytes = self._tail.bytes_read
        #: The newest amendment of the attempt's configuration, and the newest one with those that take effect after it.
        self.config_number = self.newest_live = max((a.number for a in self.state.amendments), default=0)
        #: Further receivers of messages, such as Prefect's log.
        self.message_sinks: list[Callable[[str], None]] = []
        #: Set when the flow ends early: background work stops.
        self.cancelled = threading.Event()
        #: Another run gets the nodes of this one when it has finished.
        self.keeps_nodes = False
        #: Jobs that have done their work and wait for more (``flows.runtime.jobs``).
        self.staying: list[Any] = []
        self.signals = Signals()
        self._lock = threading.RLock()
        self._log = DriverLog(run.driver_log, self.clock.now_unix_s)
        self._journal = JournalWriter(run, writer, now_unix_s=self.clock.now_unix_s, check=self._check_driver)
        self.refresh()

    def event(self, kind: str, *, attempt: int | None = None, **fields: Any) -> None:
        """Journal an event durably, and apply it to the state."""
        with self._lock:
            newest = self.state.attempt
            self._journal.attempt = attempt if attempt is not None else (newest.number if newest else 0)
            if self.simulation is None:
                self._journal.after_unix_s = max(self._journal.after_unix_s, self._tail.clock_unix_s)
            # A dry run isn't resumed after a power cut, and must not wait for a disk.
            event = self._journal.append(kind, durable=self.simulation is None, **fields)
            self._tail.add(event, self._journal.path.stem)
            self.refresh()

    def require_journal(self) -> None:
        """Wait until the journal holds every event so far; raise StoppedError if the run was asked to stop."""
        self.when_there_is_room(self._check_written)

    def when_there_is_room(self, work: Callable[[], T]) -> T:
        """Do work that needs disk space; while the disk is full, wait and retry.

        Raises:
            StoppedError: the run was asked to stop.
            StorageError: the work failed for another reason than a full disk.
        """
        waiting = False
        while True:
            try:
                return work()
            except StorageError as error:
                if error.code != DISK_FULL:
                    raise
                if not waiting:
                    self.message(f"waiting until there is room on the disk: {error.message}")
                waiting = True
            self.check_stop()
            self.clock.wait_for_event(_POLL_S)

    def look(self) -> RunState:
        """Refresh; the main thread also shows the state to the observer."""
        return self.watch() if threading.current_thread() is threading.main_thread() else self.refresh()

    def check_stop(self) -> None:
        """Raise StoppedError if the run was asked to stop, its budget is used up, or this flow ends early."""
        self.check_budget()
        if (self.look().stop_requested and self.heeds_stop) or self.cancelled.is_set():
            run_id = self.run.run_id
            raise StoppedError(f"run {run_id}: stopped on request", hint=f"hlatctl resume {run_id}")

    def check_budget(self) -> None:
        """Raise BudgetError if the run's budget is used up while it holds nodes; warn people shortly before.

        Called twice a second; without a budget it does nothing.
        """
        config, now_unix_s = self.config, self.clock.now_unix_s()
        if not self.heeds_stop or not config.budget.is_limited or not self.state.holds_nodes:
            return
        if text := spending.warning(self.state, config, now_unix_s):
            self.event("alarm", what="budget", step=self.state.step, message=text)
            self.message(text)
        if over := spending.used_up(self.run.run_id, self.state, config, now_unix_s):
            raise over

    def pause(self, seconds: float) -> None:
        """Wait; raise StoppedError if the run was asked to stop."""
        self.check_stop()
        self.clock.wait(seconds, self.check_stop)

    def _check_driver(self) -> None:
        if self.simulation is None:  # a dry run drives no jobs
            check_driver(self.run)

    def _check_written(self) -> None:
        self._journal.flush()
        if self._journal.unwritten:
            raise StorageError(f"{self._journal.path}: can't be written (the disk is full)", code=DISK_FULL)

    def refresh(self) -> RunState:
        """Apply new events of all writers to the state, and return it."""
        with self._lock:
            if self._journal.unwritten:
                self._journal.flush()
            for event in self._tail.stream():
                apply(self.state, event)
            if self._tail.bytes_read - self._kept_bytes > KEEP_BYTES:
                self._kept_bytes = self._tail.bytes_read
                read_state(self.run)  # keeps the folded state, so that the next reader begins here
            return self.state

    def watch(self) -> RunState:
        """Refresh, show the state to the observer, and raise a pending request to end; RunBusyError: another driver."""
        self.signals.check()
        self._check_driver()
        state = self.refresh()
        self.observer.update(state, self.config)
        return state

    def message(self, text: str) -> None:
        """Show one line of text, and keep it in the driver's log."""
        self.observer.message(text)
        self._log.write(text)
        for sink in self.message_sinks:
            sink(text)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def job(self, name: str, *argv: str, **options: Unpack[JobOptions]) -> Job:
        """Return a job of this run (see :func:`make_job`), without the hosts that the node ledger leaves out."""
        job = make_job(self.config, self.run, name, *argv, **options)
        return dataclasses.replace(job, excluded_hosts=self.nodes.place().left_out)

    @property
    def ledger(self) -> Path:
        """The node ledger's file; a dry run has its own, in its run directory."""
        return nodes_file(self.run.root if self.simulation else Path(self.config.runs_dir))

    @property
    def nodes(self) -> node_ledger.Nodes:
        """The hosts that this run's jobs can use, as the node ledger describes them."""
        return node_ledger.Nodes(self.ledger, self.launcher, self.config.cluster.nodes, self.clock.now_unix_s)

    @property
    def hands_over(self) -> bool:
        """Whether this driver ends because its job ends; the driver in the next job re-attaches to jobs that run."""
        return self.signals.terminated and CHAIN_ENV in os.environ

    def training_lives(self) -> bool:
        """Return whether the newest attempt's job is running now, whoever started it."""
        return live_training(self.state, self.launcher) is not None

    def hold_against(self, hosts: Iterable[str], kind: node_ledger.Kind, detail: str, *, attempt: int = 0) -> None:
        """Add an entry for each host to the node ledger; if that fails, show a message."""
        entry = node_ledger.Entry(
            time_unix_s=self.clock.now_unix_s(),
            host="",
            kind=kind,
            run_id=self.run.run_id,
            attempt=attempt,
            detail=detail,
        )
        try:
            node_ledger.record(self.ledger, [dataclasses.replace(entry, host=host) for host in hosts])
        except StorageError as error:
            self.message(f"nodes: {kind} not recorded; {error.message}")


def live_training(state: RunState, launcher: Launcher) -> Handle | None:
    """Return the handle of the newest attempt's job if that job is running now, whoever started it."""
    attempt = state.attempt
    if attempt is None or attempt.ended_unix_s is not None:
        return None
    handle = Handle.from_json(attempt.handle)
    return None if launcher.status(handle).ended else handle


def refuse_archived(run: RunPaths, state: RunState) -> None:
    """Raise a CheckpointError if the run's checkpoints were removed, so that it can't continue."""
    if state.archived:
        raise CheckpointError(
            f"run {run.run_id}: is archived, so it can't be resumed",
            hint=f"`hlatctl fork {run.run_id}` begins a new run if a checkpoint was kept",
        )


def open_context(
    run: RunPaths,
    observer: Observer | None = None,
    *,
    config: Config | None = None,
    writer: str = FLOW_WRITER,
    heeds_stop: bool = True,
    simulation: Simulation | None = None,
) -> FlowContext:
    """Return a flow's context on the cluster of its configuration.

    Args:
        config: configuration to use instead of the run's.
        writer: writer of the journal; a flow that runs alongside the run's driver has its own.
        heeds_stop: a request to stop the run ends this flow's jobs.
        simulation: the simulated cluster of the previous driver; None: a new one if the run is simulated.
    """
    config = config or of_run(run)
    begin_simulation = LAUNCHERS.part(config.cluster.launcher, "simulation")
    if simulation is None and begin_simulation:
        simulation = begin_simulation(run, config)
    launcher = simulation.launcher() if simulation else launcher_for(config)
    return FlowContext(run, config, launcher, observer, writer=writer, heeds_stop=heeds_stop, simulation=simulation)


def cache_root(config: Config) -> Path:
    """Return the folder of prepared corpora and compiled graphs that runs share; dry runs have their own."""
    root = cache_dir(Path(config.runs_dir))
    return root / "simulated" if is_simulated(config) else root


def is_simulated(config: Config) -> bool:
    """Return whether jobs are simulated."""
    return config.cluster.jobs_run == "nowhere"


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
    """Return a job of a run, which depends only on the arguments and on the user's settings of OpenMP.

    Training has its cores alone, and the configuration sets its threads. A single process gets the cores of all
    training processes and may run alongside other work: its threads don't spin, and the user's settings apply.

    Args:
        run: the run directory, which need not exist.
        attempt: the attempt whose folders take its files; 0 for jobs other than training.
        distributed: all processes of the cluster, started by torchrun, with the environment of training; otherwise one
            process.
    """
    cluster = config.cluster
    threads = {processes.THREADS: str(cluster.threads_per_process)}
    if not distributed:
        usual = {
            processes.THREADS: str(cluster.threads_per_process * cluster.processes_per_node),
            processes.WAITS: processes.GIVES_CORE_AWAY,
        }
        threads = {name: os.environ.get(name, value) for name, value in usual.items()}
    forks = distributed and DEVICES[config.backend.device].forks and not config.backend.kind.torch_xla
    return Job(
        name=name,
        run_dir=run.root,
        argv=argv,
        launch_dir=run.launch(attempt),
        log_dir=run.logs(attempt),
        env={
            **threads,
            # The working directory must not shadow hlatctl's packages: a folder named eval/ or conf/ is common.
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
        shared_modules=_shared(config, argv) if forks else (),
        each_node=each_node,
        keeps_nodes=distributed,
    )


def _shared(config: Config, argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return what is imported before processes are forked (see ``Job``).

    PyTorch's compiler takes as long as the rest of PyTorch, and not all training imports it. A distributed tensor does,
    and so each of several processes with its first checkpoint.
    """
    kind, parallel = config.backend.kind, config.parallel
    compiles = config.backend.compile or parallel.activation_checkpointing != "none"
    trains = argv[:2] in (("-m", "trainer"), ("-m", "trainer.preflight"))  # the first leaves its imports to the second
    compiler = "torch._dynamo" if trains and (compiles or config.world_size > 1) else ""
    return tuple(filter(None, (kind.code.partition(":")[0], kind.before_fork, compiler)))
