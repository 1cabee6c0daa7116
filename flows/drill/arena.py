"""The run of a drill: its journal, its driver, its processes, its disk, and MLflow's and Prefect's servers.

``reach_for`` returns how signals reach a training job, on this machine or on a Slurm cluster. ``under_small_disk``
provides a small disk that can be filled: a tmpfs mounted by bubblewrap, which all processes of this user can use.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from conf.of_run import of_run
from conf.registries import LAUNCHERS
from conf.schema import Config
from flows import control
from flows.drill import on_node
from flows.launch.base import Handle, launcher_for
from flows.launch.local import LocalLauncher
from flows.launch.slurm.launcher import SlurmLauncher
from flows.runtime import programs
from flows.runtime.context import live_training
from flows.tracking import local_server, mlflow_client, ui, ui_record
from flows.tracking.mirrors.mlflow_run import LAST_STEP_TAG
from hlatctl.run import processes
from hlatctl.run.errors import HlatctlError, LaunchError, TrainingError
from hlatctl.run.fold import apply
from hlatctl.run.journal import DRILL_WRITER, Event, JournalTail, JournalWriter
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import Identity
from hlatctl.run.state import AttemptState, RunState


class Reach(Protocol):
    """Sends signals to a training job. The methods raise LaunchError if there is nothing to signal."""

    def rank(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the training process of the last rank."""

    def program(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the program of the last node."""

    def preempt(self, handle: Handle) -> None:
        """Ask the job to stop, as a scheduler does to reclaim its nodes."""

    def cancel(self, handle: Handle) -> None:
        """Cancel the job, as an administrator does."""


class Here:
    """Jobs of this machine."""

    def __init__(self, config: Config) -> None:
        pass

    def rank(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the training process of the last rank."""
        processes.send(last_rank(handle), number)

    def program(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the job's node program."""
        processes.send(node_program(handle), number)

    def preempt(self, handle: Handle) -> None:
        """Ask the job to stop through its node program."""
        self.program(handle, signal.SIGTERM)

    def cancel(self, handle: Handle) -> None:
        """Raise LaunchError: there is no scheduler."""
        raise LaunchError("a job of this machine has no scheduler that could cancel it")


class OnSlurm:
    """Jobs of a Slurm cluster: a step that runs alongside training on the job's last node sends the signals."""

    def __init__(self, config: Config) -> None:
        self._launcher, self._last = SlurmLauncher(config.cluster), config.cluster.nodes - 1

    def rank(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the training process of the last rank."""
        self._on_last_node(handle, number, on_node.RANK)

    def program(self, handle: Handle, number: signal.Signals) -> None:
        """Signal the program of the last node."""
        self._on_last_node(handle, number, on_node.PROGRAM)

    def preempt(self, handle: Handle) -> None:
        """Signal all processes of the job, as Slurm does."""
        self._launcher.signal(handle, signal.SIGTERM)

    def cancel(self, handle: Handle) -> None:
        """Cancel the job."""
        self._launcher.signal(handle, None)

    def _on_last_node(self, handle: Handle, number: signal.Signals, what: str) -> None:
        base = Path(handle.launch_dir) / handle.name
        argv = ("-m", "flows.drill.on_node", os.fspath(base), str(self._last), what, number.name)
        self._launcher.run_beside(handle, self._last, *argv)


def reach_for(config: Config) -> Reach:
    """Return how signals reach the jobs of a configuration."""
    reach: Reach = LAUNCHERS.part(config.cluster.launcher, "drill")(config)
    return reach


def node_program(handle: Handle) -> processes.Identity:
    """Return the process of a job's node program on this machine.

    Raises:
        LaunchError: the job has none.
    """
    process = LocalLauncher().process(handle)
    if process is None:
        raise LaunchError("the training job has no process")
    return process


def last_rank(handle: Handle) -> processes.Identity:
    """Return the training process of the last rank on this machine.

    Raises:
        LaunchError: none is running.
    """
    ranks = processes.ranks(node_program(handle).pid)
    if not ranks:
        raise LaunchError("no training process is left")
    return ranks[max(ranks)]


_SERVERS_POLL_S = 0.1
_T = TypeVar("_T")

_POLL_S = 0.05
#: A pause between two looks is at least this many times as long as a look: training and servers need the processor.
_PAUSE_LOOKS = 9
#: On a machine with few cores, MLflow and Prefect must be able to start alongside training.
_YIELDING = ("nice", "-n", "5")
#: A wait ends after this time plus this many cold starts.
_PATIENCE_S, _PATIENCE_STARTS = 60.0, 8.0
#: Limit of a wait before the duration of a cold start is known.
_FIRST_START_S = 1800.0
_STOP_S = 120.0


class NotRecovered(TrainingError):
    """The run did not recover from a fault."""


class NotTried(Exception):
    """A fault can't be injected into this run; the message says why."""


class Arena:
    """A run with a driver process of its own, to observe and to disturb.

    Args:
        run: a run that is created but not started.
        journal: the drill's journal, for faults.
    """

    def __init__(self, run: RunPaths, journal: JournalWriter) -> None:
        self.run, self.config = run, of_run(run)
        self.state, self.events = RunState(), list[Event]()
        self.cold_start_s = 0.0
        """From the driver's start to the first optimizer step."""
        self._journal, self._tail = journal, JournalTail(run)
        self.reach, self._launcher = reach_for(self.config), launcher_for(self.config)
        self.trying = ""
        """The name of the fault that is being injected."""
        self._driven = False
        self._fault_step = 0

    def start(self) -> None:
        """Start the run and wait for its first step."""
        started_unix_s = time.time()
        self.drive()
        step = self.wait_for_event("the first step", 0, lambda event: event["kind"] == "step", _FIRST_START_S)
        self.cold_start_s = step["time_unix_s"] - started_unix_s

    def drive(self) -> None:
        """Start a driver process.

        Raises:
            LaunchError: the driver ended immediately.
        """
        try:
            programs.start_driver(self.run, inside=_YIELDING)
        except HlatctlError as error:
            raise LaunchError(error.message, hint=error.hint) from None
        self._driven = True

    def revive(self) -> None:
        """Resume the run if it has no driver."""
        if driver_pid(self.run) is None:
            with suppress(LaunchError):
                self.drive()
        self._driven = True

    def under_way(self) -> None:
        """Wait for two checkpoints, the newest from this attempt, and for a step after it.

        The newest checkpoint must be later than the step of the last fault: the restart policy treats two equal
        failures at one step as a repeating fault.
        """

        def ready() -> bool:
            attempt, checkpoints = self.attempt, self.state.checkpoints
            newest = attempt.newest_checkpoint
            good = len(checkpoints) > 1 and newest == checkpoints[-1]
            return good and attempt.last_step > newest > self._fault_step

        self.wait_until("two checkpoints and a step beyond them", ready)

    def look(self) -> None:
        """Read new entries of the journal."""
        for event in self._tail.read_new():
            apply(self.state, event)
            self.events.append(event)

    @property
    def attempt(self) -> AttemptState:
        """The newest attempt."""
        if self.state.attempt is None:
            raise NotRecovered("training has not been started")
        return self.state.attempt

    def inject(self, fault: str, action: Callable[[], object]) -> tuple[float, int]:
        """Inject a fault; return its Unix time, and the index in ``events`` of the first event after it."""
        self.look()
        event = self._journal.append("fault_injected", durable=True, fault=fault, run_id=self.run.run_id)
        mark, self._fault_step = len(self.events), self.state.step
        action()
        return float(event["time_unix_s"]), mark

    def wait_for_event(
        self, what: str, mark: int, wanted: Callable[[Event], bool], patience_s: float | None = None
    ) -> Event:
        """Wait for an event at or after index ``mark`` for which ``wanted`` holds, and return the first one."""
        return self.wait_until(what, lambda: next((e for e in self.events[mark:] if wanted(e)), None), patience_s)

    def wait_until(self, what: str, look_up: Callable[[], _T | None], patience_s: float | None = None) -> _T:
        """Wait until a function returns a true value, and return it.

        Raises:
            NotRecovered: the run has ended, or it takes too long.
        """
        limit_s = patience_s or _PATIENCE_S + self.config.recovery.hang_floor_s + _PATIENCE_STARTS * self.cold_start_s
        deadline = time.monotonic() + limit_s
        while True:
            began = time.monotonic()
            driven = driver_pid(self.run) is not None
            self.look()
            if value := look_up():
                return value
            if self._driven and not driven:
                ended = f"the run {self.state.status}" if self.state.status != "running" else "its driver died"
                raise NotRecovered(": ".join(filter(None, [f"no sign of {what}; {ended}", self.state.message])))
            if time.monotonic() > deadline:
                raise NotRecovered(f"no sign of {what} within {limit_s:.0f} s")
            time.sleep(max(_POLL_S, _PAUSE_LOOKS * (time.monotonic() - began)))

    def driver(self) -> Identity:
        """Return the driver's process. From now on its death is not a failure."""
        driver = self._its_driver()
        self.may_end()
        return driver

    def _its_driver(self) -> Identity:
        driver = processes.identify(driver_pid(self.run) or 0)
        if driver is None:
            raise NotRecovered("the run has no driver")
        return driver

    @contextmanager
    def driver_waits(self) -> Iterator[None]:
        """Suspend the driver during the block: a warm restart can be faster than what a drill does between attempts."""
        driver = self._its_driver()
        processes.send(driver, signal.SIGSTOP)
        try:
            yield
        finally:
            processes.send(driver, signal.SIGCONT)

    def job_has_ended(self) -> bool:
        """Return whether the newest attempt's job has ended, whether or not the driver knows."""
        return self._launcher.status(self.job).ended

    def may_end(self) -> None:
        """From now on the driver's end is not a failure."""
        self._driven = False

    @property
    def job(self) -> Handle:
        """The training job of the newest attempt."""
        return Handle.from_json(self.attempt.handle)

    def stop(self) -> None:
        """Stop the run with a checkpoint, in any state; a driver that doesn't stop is killed, and its job cancelled.

        Raises:
            NotRecovered: the run still has a driver or is still training.
        """
        self._driven = False
        control.request_stop(self.run, by=DRILL_WRITER, wait_s=_STOP_S)
        if driver := processes.identify(driver_pid(self.run) or 0):
            processes.send(driver, signal.SIGKILL)
            control.request_stop(self.run, by=DRILL_WRITER, wait_s=_STOP_S)
        self.look()
        if driver_pid(self.run) is not None or live_training(self.state, self._launcher):
            raise NotRecovered(
                f"run {self.run.run_id}: doesn't stop",
                hint=f"`hlatctl stop {self.run.run_id} --runs-dir {self.run.root.parent}`",
            )


_BLOCK = bytes(1 << 20)


def why_no_small_disk() -> str:
    """Return why this machine can't have a small disk, and how to fix that; empty if it can."""
    bwrap = shutil.which("bwrap")
    if not sys.platform.startswith("linux") or bwrap is None:
        return "needs bubblewrap (apt-get install bubblewrap)"
    tried = subprocess.run([bwrap, "--dev-bind", "/", "/", "--", "/bin/true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "bubblewrap does not work here (sysctl user.max_user_namespaces)"


@contextmanager
def under_small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Move a folder to a small disk during the block; afterwards it is a plain folder again.

    Bubblewrap mounts the disk for a process that keeps it mounted. Meanwhile the folder is a link to the disk, through
    that process's root in /proc.
    """
    mount = folder.with_name(f".{folder.name}.disk")
    mount.mkdir()
    words = ["bwrap", "--dev-bind", "/", "/", "--die-with-parent", "--size", str(size_bytes), "--tmpfs", str(mount)]
    with subprocess.Popen([*words, "--", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdin
        assert keeper.stdout
        keeper.stdin.write(b"\n")
        keeper.stdin.flush()
        keeper.stdout.readline()  # an answer means that the disk is mounted
        pid = (processes.descendants(keeper.pid) or [keeper.pid])[-1]
        on_disk = Path(f"/proc/{pid}/root") / mount.relative_to("/") / folder.name
        _replace(folder, on_disk)
        try:
            yield
        finally:
            folder.unlink()
            shutil.copytree(on_disk, folder)
            keeper.stdin.close()  # ends the process, which removes the disk
    mount.rmdir()


def fill_disk(ballast: Path) -> None:
    """Append to a file until its disk is full."""
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(_BLOCK):
            pass


def _replace(folder: Path, on_disk: Path) -> None:
    shutil.copytree(folder, on_disk)
    shutil.rmtree(folder)
    folder.symlink_to(on_disk)


class Servers:
    """The servers of a runs folder, on free ports of this machine.

    Args:
        say: called while waiting for the servers.
    """

    def __init__(self, runs_dir: Path, say: Callable[[str], None]) -> None:
        self._runs_dir, self._say = runs_dir, say
        self._prefect_port, self._mlflow_port = _free_ports()
        self._ui: subprocess.Popen[bytes] | None = None
        self._auth = ""

    @property
    def mlflow_uri(self) -> str:
        """MLflow's address."""
        return f"http://127.0.0.1:{self._mlflow_port}"

    def start(self) -> None:
        """Start both servers, and return when they answer.

        Raises:
            LaunchError: they don't start.
        """
        self._runs_dir.mkdir(parents=True, exist_ok=True)
        log = self._runs_dir / "ui.log"
        ports = ("--port=0", f"--prefect-port={self._prefect_port}", f"--mlflow-port={self._mlflow_port}")
        with log.open("ab") as output:
            serve = programs.python_command("hlatctl", "ui", *ports, "--runs-dir", os.fspath(self._runs_dir))
            self._ui = programs.start_alongside(serve, output)
        wait = local_server.Wait(self._say)
        while not (record := ui_record.read(self._runs_dir)) or not (record.mlflow and record.prefect):
            waited_s = wait.so_far_s("MLflow's and Prefect's servers")
            if self._ui.poll() is not None or waited_s > ui.START_TIMEOUT_S:
                raise LaunchError("MLflow's and Prefect's servers do not start", hint=f"see {log}")
            time.sleep(_SERVERS_POLL_S)
        self._auth = record.auth

    def kill(self) -> None:
        """Kill both servers, and stop `hlatctl ui`."""
        if self._ui is None:
            return
        for process in map(processes.identify, processes.descendants(self._ui.pid)):
            if process:
                processes.send(process, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """Stop both servers."""
        if self._ui is not None:
            self._ui.terminate()
            self._ui.wait()
            self._ui = None

    def last_step(self, run: RunPaths) -> int:
        """Return the newest step of a run in MLflow; 0 if MLflow doesn't answer."""
        with suppress(OSError, ValueError, KeyError):
            url = f"{self.mlflow_uri}/api/2.0/mlflow/runs/get?run_id={mlflow_client.copied_to(run)['run_id']}"
            tags = json.loads(local_server.get(url, self._auth, timeout_s=5))["run"]["data"]["tags"]
            return int(next(tag["value"] for tag in tags if tag["key"] == LAST_STEP_TAG))
        return 0


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
