"""The launcher protocol and its data: a job, its rendered plan, its handle and its status.

A handle is known and journalled before the job is submitted. It names the folder in which the job writes its process id
and exit code. So no job is lost if the driver dies between journalling and submitting.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from conf.registries import LAUNCHERS
from conf.schema import ClusterConfig, Config
from hlatctl.driver_job import driver_job
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, LaunchError, cannot_write
from hlatctl.run.following import Stays

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

State = Literal["queued", "running", "unknown", "succeeded", "failed", "lost"]
#: How a scheduler reports a job's end, where it reports more than an exit code.
Verdict = Literal["", "node_failed", "time_limit", "preempted", "out_of_memory", "cancelled"]
_LIVE = ("queued", "running", "unknown")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, independent of the launcher.

    Args:
        name: name of the job and its files: ``train``, ``preflight``, ``eval-833333``.
        argv: arguments of ``python`` for one process.
        launch_dir: folder of its script, process id, exit code and error.
        log_dir: folder of its output.
        env: variables to set.
        unset: variables to remove from its environment.
        wrapper: arguments of ``python``, ``-m module ...``, for a program that starts the whole command on each node.
        processes_per_node: number of processes that torchrun starts; 0: one process without torchrun, on one node
            unless ``each_node``.
        shared_modules: modules to import before its processes are forked, or functions to call as ``MODULE:FUNCTION``;
            empty: each must be a new interpreter.
        each_node: start one process on each of its nodes, without torchrun.
        nodes: number of nodes.
        keeps_nodes: it runs on the nodes that a scheduler keeps for the run between such jobs.
        all_nodes: it runs on spare nodes too.
        excluded_hosts: hosts that it must not use.
        avoided_hosts: hosts that it uses only if there are no others.
        stays: ``passed`` or ``failed``: after such an end, processes that have imported everything stay for the next
            job that sets it, and such processes may run this job too. Empty: it takes over nothing, and leaves nothing.
        beside_training: it may run on the nodes of training and must not slow training down.
        partition: the scheduler's partition for this job; None: that of the cluster's configuration.
        devices: number of training's devices that a job without torchrun uses. It requests them as training does, in
            proportion, unless its options or resources name devices. A job with torchrun gets what the configuration
            requests.
        options: scheduler options for this job alone.
        resources: limits of a pod that runs one process without torchrun.
        node_selector: labels that a pod's node must have; empty: those of the cluster's configuration.
    """

    name: str
    run_dir: Path
    argv: tuple[str, ...]
    launch_dir: Path
    log_dir: Path
    env: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    processes_per_node: int = 0
    shared_modules: tuple[str, ...] = ()
    each_node: bool = False
    nodes: int = 1
    keeps_nodes: bool = False
    all_nodes: bool = False
    excluded_hosts: tuple[str, ...] = ()
    avoided_hosts: tuple[str, ...] = ()
    stays: Stays = ""
    beside_training: bool = False
    partition: str | None = None
    devices: int = 0
    options: tuple[str, ...] = ()
    resources: dict[str, str] = field(default_factory=dict)
    node_selector: dict[str, str] = field(default_factory=dict)

    @property
    def imported(self) -> str:
        """Identifies all that a process with the job's imports depends on: everything but the module and arguments."""
        env = self.env
        for folder, name in ((self.log_dir, "LOGS"), (self.launch_dir, "LAUNCH")):
            env = {key: value.replace(os.fspath(folder), name) for key, value in env.items()}
        modules, unset = list(self.shared_modules), list(self.unset)
        return files.sha256_json({"processes": self.processes_per_node, "modules": modules, "unset": unset, "env": env})

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.log_dir / f"{self.name}.log"

    @property
    def error_file(self) -> Path:
        """The file in which it leaves an error that a person can act on."""
        return self.launch_dir / f"{self.name}.error.json"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes that a scheduler keeps for a run.

    Args:
        name: unique name among the run's allocations.
        hosts: hosts that can be used now; empty while it waits for nodes.
    """

    name: str
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A job and the exact text of its script.

    ``nodes_script`` is the script that keeps the job's nodes, if a scheduler does.
    """

    job: Job
    script: str
    script_path: Path
    nodes_script: str = ""


@dataclass(frozen=True, kw_only=True)
class Handle:
    """Identifies a submitted job for any process; JSON through ``to_json`` and ``from_json``."""

    launcher: str
    name: str
    launch_dir: str

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for the journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Handle:
        """Return the handle from the journal's values."""
        return cls(launcher=value["launcher"], name=value["name"], launch_dir=value["launch_dir"])


@dataclass(frozen=True, kw_only=True)
class Status:
    """A job's state.

    Args:
        state: ``queued``: waits for the scheduler. ``unknown``: the scheduler does not answer, so nothing may be
            concluded. ``lost``: it is gone and left no exit code.
        exit_code: exit code of a job that ended; 128 + n: ended by signal n.
        reason: the scheduler's reason for the wait or the end.
        expected_start_unix_s: when the scheduler expects to start a queued job.
        verdict: how the job ended, in the scheduler's view.
        blamed_hosts: hosts that failed first.
    """

    state: State
    exit_code: int | None = None
    reason: str = ""
    expected_start_unix_s: float | None = None
    verdict: Verdict = ""
    hosts: tuple[str, ...] = ()
    blamed_hosts: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state not in _LIVE


class Launcher(Protocol):
    """Starts jobs and reports their states. What is implemented here is right for a launcher that keeps no nodes."""

    name: str
    weighs_jobs: bool = False
    """Jobs alongside training run at a lower priority, which can't be raised later."""
    keeps_nodes: bool = False
    """The run's jobs run in turn on nodes that a scheduler keeps for it."""

    def check_limits(self, config: Config) -> str:
        """Check that the scheduler can ever start jobs of this shape.

        Returns:
            A warning why jobs may wait for long; empty if there is none.

        Raises:
            ConfigError: it never can.
            AwayError: it does not answer.
            LaunchError: it is not installed, or refuses.
        """
        return ""

    def interruption(self, config: Config) -> str:
        """Return in words what the scheduler will interrupt jobs for; empty: nothing, or it does not answer."""
        return ""

    def stops(self, config: Config) -> PlannedStops:
        """Return when the scheduler will end jobs of training, as far as it is known now."""
        return PlannedStops()

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """Return the hosts that a job on this many nodes can use, including spare ones."""

    def render(self, job: Job) -> JobPlan:
        """Return the job as text, without changing anything."""

    def handle(self, plan: JobPlan) -> Handle:
        """Return the handle that the job will have."""
        return Handle(launcher=self.name, name=plan.job.name, launch_dir=os.fspath(plan.job.launch_dir))

    def submit(self, plan: JobPlan) -> Handle:
        """Start the job; return when it can be found through its handle.

        Raises:
            StorageError: its files can't be written; nothing was started.
            LaunchError: it did not start, or the scheduler refuses it or does not answer.
        """

    def status(self, handle: Handle) -> Status:
        """Return the state of a job, whichever process submitted it."""

    def has_ended(self, handle: Handle) -> bool:
        """Return whether the end of a job is already known. Costs microseconds; False where that would cost more."""
        return False

    def cancel(self, handle: Handle, *, grace_s: float) -> None:
        """Ask the job to stop (SIGTERM), end it after ``grace_s``, and return when none of its processes is left.

        What an ended job that ``stays`` has left, for the run's next job of that kind, ends with :meth:`release`.
        """

    def allocation(self, job: Job) -> Allocation | None:
        """Return the nodes that are kept for a job's run; None if there are none on which the job can run."""
        return None

    def release(self, run_dir: Path) -> None:
        """Release what is kept for a run, once its job has ended: nodes, and what it left for the next job."""
        return

    def pass_on(self, run_dir: Path, to: Path) -> None:
        """Let another run, on as many nodes or fewer, use the nodes that are kept for a run whose jobs have ended."""
        return

    def dump_stacks(self, handle: Handle) -> str:
        """Ask all processes of the job to print their stacks into their logs; return the result in one sentence."""

    def oom_kills(self) -> int | None:
        """Return how many processes the hosts' kernels have killed because memory ran out.

        None: unknown, or each node reports its own count in its record of the end.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class PlannedStops:
    """When a scheduler ends jobs of training.

    Args:
        after_s: time after which each job is asked to stop; None: never.
        maintenance_unix_s: begin and end of the next maintenance that leaves too few nodes; None: none is known.
    """

    after_s: int | None = None
    maintenance_unix_s: tuple[float, float] | None = None


class Drivers(Protocol):
    """Runs the driver of a run or a sweep as a job, which the next such job replaces (``hlatctl.driver_job``).

    ``place`` is the file of the chain of jobs: ``RunPaths.driver_job``, or ``evaluator_job`` for a `hlatctl eval`.
    """

    def check(self, cluster: ClusterConfig) -> None:
        """Check that the scheduler can start such a job.

        Raises:
            ConfigError: it never can.
            LaunchError: it does not answer, or is not installed.
        """

    def submit(self, place: Path, words: Sequence[str], cluster: ClusterConfig) -> str:
        """Submit a job that runs `hlatctl WORDS`, in place of any earlier one; return the job's name for people.

        Raises:
            StorageError: its files can't be written.
            LaunchError: the scheduler refuses it or does not answer.
        """

    def state(self, place: Path) -> str:
        """Return where the jobs are, in words; empty if none waits or runs.

        Raises:
            AwayError: the scheduler does not answer.
        """

    def end_waiting(self, place: Path) -> None:
        """Let no further job begin, and cancel those that wait. A running one continues to its command's end."""

    def end(self, place: Path) -> None:
        """Do the same, and end a running job too."""

    def interrupt(self, place: Path) -> None:
        """Let no further job begin, and stop the command of a running job as Ctrl-C does."""


class AwayError(LaunchError):
    """The scheduler does not answer, so nothing is known of its jobs."""


def launcher_for(config: Config) -> Launcher:
    """Return the launcher that ``cluster.launcher`` names. A simulated one only renders jobs."""
    launcher: Launcher = LAUNCHERS.create(config.cluster.launcher, config)
    return launcher


def drivers_for(name: str) -> Drivers:
    """Return what runs drivers as jobs of a launcher.

    Raises:
        ConfigError: the launcher can't.
    """
    able = [launcher for launcher in LAUNCHERS if launcher in LAUNCHERS.built_in and LAUNCHERS[launcher].drivers]
    if name not in LAUNCHERS or not (make := LAUNCHERS.part(name, "drivers")):
        hint = "--detach runs the driver in the background; in a Kubernetes cluster, use deploy/kubernetes/driver.yaml"
        raise ConfigError(f"--driver={name}: must be {' or '.join(able)}", hint=hint)
    drivers: Drivers = make()
    return drivers


def driver_jobs(place: Path) -> str | None:
    """Return where the jobs that drive or evaluate a run are, in words; None if no jobs do (``Drivers``).

    Empty if no job is left although the run has not ended, such as after somebody cancelled all of them.

    Raises:
        LaunchError: the scheduler does not answer, or its commands are not installed here.
        ConfigError: the launcher's package is not installed here.
    """
    chain = driver_job(place)
    return None if chain is None else drivers_for(chain.launcher).state(place)


@contextmanager
def writing(job: Job) -> Iterator[None]:
    """Raise StorageError if a job's files can't be written in this block."""
    try:
        yield
    except OSError as error:
        place = f"job {job.name}: {error.filename or job.launch_dir}"
        raise cannot_write(place, error, hint="free space, or repair the storage, then `hlatctl resume`") from None


def quote(words: tuple[str, ...]) -> str:
    """Return words as a shell command, each quoted, so that a value never becomes shell syntax."""
    return " ".join(shlex.quote(word) for word in words)


def export_lines(env: dict[str, str], unset: tuple[str, ...] = ()) -> str:
    """Return sorted lines ``export NAME=value`` and ``unset NAME``.

    Raises:
        ConfigError: a name is not a valid variable name.
    """
    for name in (*env, *unset):
        if not _ENV_NAME.fullmatch(name):
            raise ConfigError(f"{name!r}: is not a name of an environment variable")
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items())]
    return "".join([*exports, *(f"unset {name}\n" for name in sorted(unset))])
