"""The launcher protocol and its plain data: a job, its rendered plan, its handle and its status.

A handle is known before submission and is journalled first: it names a place (the job's launch folder) where the job
leaves its process id and exit code. So a head that dies between submitting and journalling loses no job.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from hlatctl.run.errors import ConfigError

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

State = Literal["queued", "running", "unknown", "succeeded", "failed", "lost"]
#: How a scheduler says that a job ended, where it says more than an exit code.
Verdict = Literal["", "node_failed", "time_limit", "preempted", "out_of_memory", "cancelled"]
_LIVE = ("queued", "running", "unknown")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to run, in no launcher's words.

    Args:
        name: names its files: ``train``, ``preflight``, ``eval-833333``.
        run_dir: the run it belongs to.
        argv: the program of one process, without the launching program.
        launch_dir: where its script, process id, exit code and error go.
        log_dir: where its output goes.
        env: variables to set for it.
        unset: variables to take from its environment.
        wrapper: a program of this interpreter, as ``-m module arguments``, that starts the whole command on each node.
        processes_per_node: 0 runs ``argv`` once, without torchrun, on one node if not ``each_node``.
        each_node: runs ``argv`` once on every one of its nodes; without torchrun.
        nodes: nodes it takes.
        excluded_hosts: it is kept from these.
        beside_training: it may run where training runs, and must not slow it.
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
    each_node: bool = False
    nodes: int = 1
    excluded_hosts: tuple[str, ...] = ()
    beside_training: bool = False

    @property
    def log(self) -> Path:
        """The file that its output goes to."""
        return self.log_dir / f"{self.name}.log"

    @property
    def error_file(self) -> Path:
        """Where it leaves an error that a person can act on."""
        return self.launch_dir / f"{self.name}.error.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job as text: exactly what will be submitted.

    Args:
        script: the script's text.
        script_path: where it is written.
    """

    job: Job
    script: str
    script_path: Path


@dataclass(frozen=True, kw_only=True)
class Handle:
    """How to find a submitted job again, from any process; JSON through ``to_json``/``from_json``."""

    launcher: str
    name: str
    launch_dir: str

    def to_json(self) -> dict[str, Any]:
        """As plain values for the journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Handle:
        """From the journal's plain values."""
        return cls(launcher=value["launcher"], name=value["name"], launch_dir=value["launch_dir"])


@dataclass(frozen=True, kw_only=True)
class Status:
    """How a job stands.

    Args:
        state: ``queued`` waits for the scheduler. ``unknown``: the scheduler does not answer, so nothing may be
            concluded. ``lost`` means that it is gone and left no exit code.
        exit_code: of a job that ended; 128 + n if signal n ended it.
        reason: the scheduler's, for waiting or for the end.
        expected_start_unix_s: when the scheduler expects to start a queued job.
        verdict: how the scheduler says that it ended.
        hosts: the hosts that it had.
        blamed_hosts: those that failed first.
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
        """It will not change any more."""
        return self.state not in _LIVE


class Launcher(Protocol):
    """Starts jobs and tells how they stand."""

    name: str
    weighs_jobs: bool
    """A job beside training gets less of the processors, for as long as it lives."""

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """Where a job of so many nodes can be placed: more hosts than that if there are spare ones."""

    def render(self, job: Job) -> Plan:
        """The job as text; touches nothing."""

    def handle(self, plan: Plan) -> Handle:
        """The handle that ``submit`` will give the job."""

    def submit(self, plan: Plan) -> Handle:
        """Start it; returns once the job can be found through its handle."""

    def status(self, handle: Handle) -> Status:
        """How it stands, whoever submitted it."""

    def cancel(self, handle: Handle, *, grace_s: float) -> None:
        """Ask it to end (SIGTERM) and, after the grace, make it; returns when nothing of it is left."""

    def dump_stacks(self, handle: Handle) -> str:
        """Have all of its processes print their stacks into their logs; what came of it, in one sentence."""

    def oom_kills(self) -> int | None:
        """Processes that its hosts' kernels have killed for want of memory; None where that can't be known."""


def quote(words: tuple[str, ...]) -> str:
    """Words as a shell command, each quoted: configuration never becomes shell syntax."""
    return " ".join(shlex.quote(word) for word in words)


def export_lines(env: dict[str, str], unset: tuple[str, ...] = ()) -> str:
    """``export NAME=value`` and ``unset NAME`` lines, sorted.

    Raises:
        ConfigError: a name that is no variable name.
    """
    for name in (*env, *unset):
        if not _ENV_NAME.fullmatch(name):
            raise ConfigError(f"{name!r}: is no name of an environment variable")
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items())]
    return "".join([*exports, *(f"unset {name}\n" for name in sorted(unset))])
