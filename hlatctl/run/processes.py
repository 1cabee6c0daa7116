"""Identifies processes of this machine, finds those of a job, signals them safely, and starts processes of Python.

The kernel reuses process ids, and a recorded id can be older than the last reboot. So a process is identified by its
id, its start time and the boot id, and is signalled only if all three match. Names of nodes and free memory are here
too; free memory is known on Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import getpass
import itertools
import os
import platform
import pwd
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

import hlatctl
from hlatctl.run.errors import LaunchError

#: Environment variable of all processes of a job: its token. It finds them even after their parents have died.
JOB_ENV = "HLATCTL_JOB"
#: Environment variable of processes that this module prepares: the id of the process that starts them.
PARENT_ENV = "HLATCTL_PARENT"

#: Maximum to which a job's process raises its limit; the kernel's default hard limit (fs.nr_open).
_MOST_OPEN_FILES = 1 << 20
#: Time for the kernel to end processes. One that hangs in a device driver is left.
_END_S, _POLL_S = 10.0, 0.05
_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
#: Counters of this container, or else of the machine.
_OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), _PROC / "vmstat")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
#: Beginning of the name of a training process that was forked, and of its threads and forked children; a rank follows.
_RANK_NAME = "rank "
#: Loaded early, because nothing may be imported between fork and exec.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
#: Indexes in /proc/PID/stat after the command's name (proc_pid_stat(5)).
_STATE, _PARENT, _START = 0, 1, 19


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The identity of one process, which no later process with the same id has.

    Args:
        started: start time as the system reports it: clock ticks since boot on Linux.
        boot_id: id of the boot in which it runs.
    """

    pid: int
    started: str
    boot_id: str


def identify(pid: int) -> Identity | None:
    """Return the process with an id. None if there is none, or only a zombie."""
    started = _started(pid) if pid > 0 else ""
    return Identity(pid=pid, started=started, boot_id=_boot_id()) if started else None


def alive(process: Identity) -> bool:
    """Return whether a process is still running."""
    return identify(process.pid) == process


def send(process: Identity, number: signal.Signals) -> bool:
    """Signal a process if it is still running. Return whether it was.

    Raises:
        LaunchError: it belongs to another user.
    """
    if process.pid <= 1:
        return False
    try:
        with _pinned(process.pid) as descriptor:
            if not alive(process):
                return False
            if _owner(process.pid) != os.geteuid():  # root could signal any process
                raise PermissionError
            if descriptor is None:
                os.kill(process.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise LaunchError(
            f"process {process.pid}: belongs to another user, so {number.name} can't be sent to it",
            hint=f"as that user or as root: kill -{number.name.removeprefix('SIG')} {process.pid}",
        ) from None
    return True


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, even after ``exec``. Linux only.

    The kernel reports only later deaths, so a process whose parent is already dead kills itself.

    Args:
        parent: id of the process that started this one; None: ``PARENT_ENV`` names it, if that is set.
    """
    if not _PRCTL:
        return
    if parent is None:
        named = os.environ.pop(PARENT_ENV, "")
        parent = int(named) if named.isdecimal() else os.getppid()
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def call_rank(rank: int) -> None:
    """Name this process after its rank, so that :func:`ranks` and ``top`` show it. Linux only.

    The system shows the environment with which a process was executed, and a forked one has its parent's.
    """
    if _PRCTL:
        _PRCTL(_PR_SET_NAME, f"{_RANK_NAME}{rank}".encode())


def most_open_files() -> int:
    """Return how many files a job's process can open: the hard limit, up to a million."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)


def raise_open_files() -> None:
    """Raise this process's limit of open files and sockets to :func:`most_open_files`; never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most_open_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_open_files(), hard))


def serve_parent() -> TextIO:
    """Return stdout, for the answers to the process that started this one, and end with that process.

    Libraries print to stdout, too. Their lines go to stderr.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def with_words(*words: str) -> list[Identity]:
    """Return the processes of this user whose command line contains these words in order. Linux only."""
    count = len(words)
    return [
        process
        for process in _own()
        for line in [command_line(process.pid)]
        if any(line[place : place + count] == words for place in range(len(line)))
    ]


def job_of(pid: int) -> str:
    """Return the token of a process's job. Empty if it has none."""
    return _variable(pid, JOB_ENV)


def of_job(token: str) -> list[Identity]:
    """Return this user's processes of a job and their descendants, in ascending order. Linux only.

    Reads the environment of each of this user's processes: about 20 us each.
    """
    wanted = f"{JOB_ENV}={token}".encode()
    marked = [process for process in _own() if wanted in _environment(process.pid)]
    below = _identified(descendants(*(process.pid for process in marked)))
    by_pid = {process.pid: process for process in (*marked, *below) if process.pid != os.getpid()}
    return [by_pid[pid] for pid in sorted(by_pid)]


def end_job(*tokens: str, and_also: Iterable[Identity] = (), but: Collection[Identity] = ()) -> bool:
    """Kill all processes of some jobs, except some and this one. Return whether none is left after 10 s.

    Args:
        and_also: further processes to kill.
    """
    deadline_s, others = time.monotonic() + _END_S, tuple(and_also)
    while remaining := [
        process
        for process in {*others, *itertools.chain.from_iterable(map(of_job, tokens))}
        if process not in but and alive(process)
    ]:
        for process in remaining:
            send(process, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def descendants(*pids: int) -> list[int]:
    """Return the ids of all descendants of some processes, ascending, in any session."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields:
            children.setdefault(int(fields[_PARENT]), []).append(int(entry.name))
    below, pending = set[int](), list(pids)
    while pending:
        new = set(children.get(pending.pop(), [])) - below
        below |= new
        pending += new
    return sorted(below)


def ranks(pid: int) -> dict[int, Identity]:
    """Return the training processes below one, by rank. Their children have the same rank."""
    by_rank = {}
    for process in _identified(descendants(pid)):
        rank, fields = rank_of(process.pid), _stat(process.pid)
        if rank is not None and fields and rank_of(int(fields[_PARENT])) is None:
            by_rank[rank] = process
    return dict(sorted(by_rank.items()))


def rank_of(pid: int) -> int | None:
    """Return the rank of a training process or its child: torchrun sets ``RANK``, others have a name. None: none."""
    try:
        name = (_PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    rank = name.removeprefix(_RANK_NAME) if name.startswith(_RANK_NAME) else _variable(pid, "RANK")
    return int(rank) if rank.isdecimal() else None


def ask_for_stacks(pids: list[int]) -> str:
    """Send SIGUSR1 to the processes that catch it, so that they print their stacks. Return the outcome in one sentence.

    SIGUSR1 ends a process that doesn't catch it. A stopped process can't respond.
    """
    catching = [process for process in _identified(pids) if _catches(process.pid, signal.SIGUSR1)]
    if not catching:
        return "no running process can print its stack"
    stopped = [process for process in catching if (_stat(process.pid) or [""])[_STATE] in ("T", "t")]
    asked = [process for process in catching if process not in stopped]
    for process in asked:
        send(process, signal.SIGUSR1)
    parts = [f"{len(asked)} of {len(catching)} processes were asked to print their stacks to their logs"]
    parts += [f"process {process.pid} is stopped and can't print its stack" for process in stopped]
    return "; ".join(parts)


def command_line(pid: int) -> tuple[str, ...]:
    """Return the command line of a process. Empty if it has ended, or without ``/proc``."""
    try:
        text = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(word.decode(errors="replace") for word in text.rstrip(b"\0").split(b"\0"))


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed because memory ran out. None if unknown."""
    for path in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            match = re.search(r"^oom_kill (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            if match:
                return int(match[1])
    return None


@contextlib.contextmanager
def _pinned(pid: int) -> Iterator[int | None]:
    """Yield a descriptor that signals this process and no later one with its id. None if the system has none."""
    if not hasattr(os, "pidfd_open"):
        yield None
        return
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@functools.cache
def _boot_id() -> str:
    if _PROC.joinpath("self").exists():
        return _BOOT_ID.read_text(encoding="utf-8").strip()
    return _output_of("sysctl", "-n", "kern.boottime")


def _started(pid: int) -> str:
    if not _PROC.joinpath("self").exists():
        return _output_of("ps", "-o", "lstart=", "-p", str(pid))
    fields = _stat(pid)
    return fields[_START] if fields and fields[_STATE] not in ("Z", "X") else ""


def _output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _identified(pids: Iterable[int]) -> list[Identity]:
    return [process for pid in pids if (process := identify(pid))]


def _own() -> list[Identity]:
    pids = [int(entry.name) for entry in _PROC.glob("[0-9]*")]
    return _identified(pid for pid in pids if _owner(pid) == os.geteuid())


def _owner(pid: int) -> int | None:
    if not _PROC.joinpath("self").exists():
        return os.geteuid()
    try:
        return (_PROC / str(pid)).stat().st_uid
    except OSError:
        return None


def _catches(pid: int, number: int) -> bool:
    try:
        status = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _variable(pid: int, name: str) -> str:
    prefix = f"{name}=".encode()
    values = (value for value in _environment(pid) if value.startswith(prefix))
    return next((value.removeprefix(prefix).decode() for value in values), "")


def _stat(pid: int) -> list[str]:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


#: Variables of OpenMP, and of libraries that follow it.
THREADS, WAITS = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
#: A waiting thread yields its core. By default it spins for a while, and during other work the
#: others need that core.
GIVES_CORE_AWAY = "passive"


def child_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment for a process that this one starts, by default a copy of this one's.

    Python finds the packages of this process there, and the new process can end with this one
    (:func:`end_with_parent`).
    OpenMP threads yield their core while they wait, unless the user has set another policy.
    """
    env = os.environ if env is None else env
    package_root = os.fspath(Path(hlatctl.__file__).parent.parent)
    search_path = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    return {WAITS: GIVES_CORE_AWAY, **env, "PYTHONPATH": search_path, PARENT_ENV: str(os.getpid())}


def pipe_in(process: subprocess.Popen[bytes]) -> IO[bytes]:
    """Return the pipe to a process that was started with one."""
    assert process.stdin is not None
    return process.stdin


def pipe_out(process: subprocess.Popen[bytes]) -> IO[bytes]:
    """Return the pipe from a process that was started with one."""
    assert process.stdout is not None
    return process.stdout


def wait_and_close(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process, and close the pipes to and from it."""
    process.wait()
    for stream in (pipe_in(process), pipe_out(process)):
        with suppress(BrokenPipeError):
            stream.close()


def user_name() -> str:
    """Return the name of this process's user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return "unknown"


def name_of_user(uid: int) -> str:
    """Return the name of a user; the number of one whom this machine doesn't know."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


#: The Python of a bundle that is one file on shared storage (``deploy/bundle/local.sh``), which sets this.
_PYTHON_ENV = "HLATCTL_PYTHON"


def node_python() -> str:
    """Return the program that starts Python with this process's packages on any node that shares its storage."""
    return os.environ.get(_PYTHON_ENV) or sys.executable


NODE_NAME_ENV = "HLATCTL_NODE_NAME"


def node_name() -> str:
    """Return the scheduler's name of this node, or else the machine's own."""
    return os.environ.get(NODE_NAME_ENV) or platform.node()


#: The control group of a container, which sees its own as the root.
_CGROUP = Path("/sys/fs/cgroup")
_ADJUSTMENT = Path("/proc/self/oom_score_adj")
#: The kernel's highest value (proc_pid_oom_score_adj(5)).
_FIRST = "1000"


def free_host_bytes() -> int:
    """Return the memory still available to processes: the host's, or the control group's if it has less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    with suppress(OSError, ValueError):  # no such control group, or no limit ("max")
        limit, used = (int((_CGROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        free = max(0, min(free, limit - used + _dropped_first_bytes()))
    return free


def _dropped_first_bytes() -> int:
    """Return the size of the control group's file cache, which the kernel drops first."""
    with suppress(OSError, ValueError):  # no such control group
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return int(stat.get("inactive_file", 0))
    return 0


def die_first() -> None:
    """Have the kernel kill this process and those it starts before others when memory runs out."""
    with suppress(OSError):  # this file exists only on Linux
        _ADJUSTMENT.write_text(_FIRST, encoding="ascii")
