"""What this machine's kernel says of a job's processes. Linux only; elsewhere nothing is known."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

_PROC = Path("/proc")
#: Of this container, or else of the whole machine.
_OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), _PROC / "vmstat")


def oom_kills() -> int | None:
    """Processes that the kernel has killed for want of memory; None where it does not tell."""
    for path in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            if found:
                return int(found[1])
    return None


def descendants(pid: int) -> list[int]:
    """The processes below one, whatever sessions they are in, ascending."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return sorted(found)


def ranks(pid: int) -> dict[int, int]:
    """The distributed processes below one, by rank: torchrun gives each its ``RANK``, which their children inherit."""
    found = {}
    for child in descendants(pid):
        rank, fields = _variable(child, "RANK"), _stat(child)
        if rank.isdigit() and fields and not _variable(int(fields[1]), "RANK"):
            found[int(rank)] = child
    return dict(sorted(found.items()))


def ask_for_stacks(pids: list[int]) -> str:
    """Send SIGUSR1 to the processes that catch it, which print their stacks; what came of it, in one sentence.

    The signal ends a process that does not catch it, so no other gets it. One that is stopped can not answer.
    """
    catching = [pid for pid in pids if _catches(pid, signal.SIGUSR1)]
    if not catching:
        return "no process is left that could show its stack"
    stopped = [pid for pid in catching if (_stat(pid) or [""])[0] in ("T", "t")]
    asked = [pid for pid in catching if pid not in stopped]
    for pid in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    parts = [f"{len(asked)} of {len(catching)} processes asked to print their stacks into their logs"]
    parts += [f"process {pid} is stopped and can not show its stack" for pid in stopped]
    return "; ".join(parts)


def _catches(pid: int, number: int) -> bool:
    try:
        status = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def _variable(pid: int, name: str) -> str:
    """An environment variable that a process was started with; empty if it has none, or is gone."""
    try:
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    prefix = f"{name}=".encode()
    return next((found.removeprefix(prefix).decode() for found in variables if found.startswith(prefix)), "")


def _stat(pid: int) -> list[str]:
    """State, parent and the rest of a process; empty if it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
