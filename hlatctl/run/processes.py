"""Processes of this machine: which process one is, which belong to a job, and signals that reach no other process.

The kernel reuses process ids, and a file that names one may be older than the last reboot. So a process is remembered
by its id, its start time and the boot, and is signalled only while all three still agree.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hlatctl.run.errors import LaunchError

#: Set for all processes of a job to the job's own token, by which they are found even after their parents have died.
JOB_ENV = "HLATCTL_JOB"

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
#: Of this container, or else of the whole machine.
_OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), _PROC / "vmstat")
#: Places in /proc/PID/stat, counted from the state, which follows the command's name (proc_pid_stat(5)).
_STATE, _PARENT, _START = 0, 1, 19


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One process, and no later one that gets its id.

    Args:
        pid: its id.
        started: when it started, as the system reports it: clock ticks since the boot on Linux.
        boot_id: the boot that it runs in.
    """

    pid: int
    started: str
    boot_id: str


def identify(pid: int) -> Identity | None:
    """The process that has an id now; None if there is none, or only a zombie."""
    started = _started(pid) if pid > 0 else ""
    return Identity(pid=pid, started=started, boot_id=_boot_id()) if started else None


def alive(process: Identity) -> bool:
    """Whether it still runs."""
    return identify(process.pid) == process


def send(process: Identity, number: signal.Signals) -> bool:
    """Signal a process if it still runs; whether it did.

    Raises:
        LaunchError: it belongs to another user.
    """
    if process.pid <= 1:
        return False
    try:
        with _pinned(process.pid) as descriptor:
            if not alive(process):
                return False
            if _owner(process.pid) != os.geteuid():  # root may signal anybody
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


def with_words(*words: str) -> list[Identity]:
    """The processes of this user that were started with these words, one after the other. Linux only."""
    count = len(words)
    return [
        process
        for process in _own()
        for line in [command_line(process.pid)]
        if any(line[place : place + count] == words for place in range(len(line)))
    ]


def job_of(pid: int) -> str:
    """The token of the job that a process belongs to; empty if it belongs to none."""
    return _variable(pid, JOB_ENV)


def of_job(token: str) -> list[Identity]:
    """The processes of this user that belong to a job, and those below them, in ascending order. Linux only.

    Reads the environment of each of this user's processes once: some 20 us each.
    """
    wanted = f"{JOB_ENV}={token}".encode()
    marked = [process for process in _own() if wanted in _environment(process.pid)]
    below = _identified(descendants(*(process.pid for process in marked)))
    found = {process.pid: process for process in (*marked, *below) if process.pid != os.getpid()}
    return [found[pid] for pid in sorted(found)]


def descendants(*pids: int) -> list[int]:
    """The processes below some, whatever sessions they are in, ascending."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields:
            children.setdefault(int(fields[_PARENT]), []).append(int(entry.name))
    found, waiting = set[int](), list(pids)
    while waiting:
        below = set(children.get(waiting.pop(), [])) - found
        found |= below
        waiting += below
    return sorted(found)


def ranks(pid: int) -> dict[int, Identity]:
    """The distributed processes below one, by rank: torchrun gives each its ``RANK``, which their children inherit."""
    found = {}
    for process in _identified(descendants(pid)):
        rank, fields = _variable(process.pid, "RANK"), _stat(process.pid)
        if rank.isdigit() and fields and not _variable(int(fields[_PARENT]), "RANK"):
            found[int(rank)] = process
    return dict(sorted(found.items()))


def ask_for_stacks(pids: list[int]) -> str:
    """Send SIGUSR1 to the processes that catch it, which print their stacks; what came of it, in one sentence.

    The signal ends a process that does not catch it, so no other gets it. One that is stopped can not answer.
    """
    catching = [process for process in _identified(pids) if _catches(process.pid, signal.SIGUSR1)]
    if not catching:
        return "no process is left that could show its stack"
    stopped = [process for process in catching if (_stat(process.pid) or [""])[_STATE] in ("T", "t")]
    asked = [process for process in catching if process not in stopped]
    for process in asked:
        send(process, signal.SIGUSR1)
    parts = [f"{len(asked)} of {len(catching)} processes asked to print their stacks into their logs"]
    parts += [f"process {process.pid} is stopped and can not show its stack" for process in stopped]
    return "; ".join(parts)


def command_line(pid: int) -> tuple[str, ...]:
    """The words that a process was started with; empty if it is gone, or where there is no ``/proc``."""
    try:
        text = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(word.decode(errors="replace") for word in text.rstrip(b"\0").split(b"\0"))


def oom_kills() -> int | None:
    """Processes that the kernel has killed for want of memory; None where it does not tell."""
    for path in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            if found:
                return int(found[1])
    return None


@contextlib.contextmanager
def _pinned(pid: int) -> Iterator[int | None]:
    """A descriptor of the process that has an id now, to signal it and no later one; None where there are none."""
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
    """When a process started; empty if there is none, or only a zombie."""
    if not _PROC.joinpath("self").exists():
        return _output_of("ps", "-o", "lstart=", "-p", str(pid))
    fields = _stat(pid)
    return fields[_START] if fields and fields[_STATE] not in ("Z", "X") else ""


def _output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _identified(pids: Iterable[int]) -> list[Identity]:
    return [process for pid in pids if (process := identify(pid))]


def _own() -> list[Identity]:
    """The processes of this user."""
    pids = [int(entry.name) for entry in _PROC.glob("[0-9]*")]
    return _identified(pid for pid in pids if _owner(pid) == os.geteuid())


def _owner(pid: int) -> int | None:
    """The user of a process; this one where there is no ``/proc`` to tell, None if it is gone."""
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
    """The variables that a process was started with; empty if it is gone."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _variable(pid: int, name: str) -> str:
    """An environment variable that a process was started with; empty if it has none, or is gone."""
    prefix = f"{name}=".encode()
    found = (value for value in _environment(pid) if value.startswith(prefix))
    return next((value.removeprefix(prefix).decode() for value in found), "")


def _stat(pid: int) -> list[str]:
    """State, parent and the rest of a process; empty if it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
