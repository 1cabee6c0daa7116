"""Read the start and end records of a local job: its process, its other processes, its exit code.

``hlatctl.node`` writes both files as JSON. Scripts of older versions wrote process id and exit code as bare numbers. A
bare process id counts only while that process runs the job's script.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.launch.base import Handle
from hlatctl import node
from hlatctl.run import files, processes
from hlatctl.run.processes import Identity
from hlatctl.run.reading import DAMAGED


@dataclass(frozen=True, kw_only=True)
class Record:
    """A job that was started on this machine.

    Args:
        process: ``hlatctl.node``, or the shell of an older version's job.
        token: of the job's processes; empty for an older version's job, whose processes are descendants of its shell.
    """

    process: Identity
    token: str

    def members(self) -> list[Identity]:
        """Return the job's processes that are alive."""
        if self.token:
            return [process for process in (*processes.of_job(self.token), self.process) if processes.alive(process)]
        if not processes.alive(self.process):
            return []
        below = (processes.identify(pid) for pid in processes.descendants(self.process.pid))
        return [self.process, *(process for process in below if process)]

    def ask_to_stop(self) -> None:
        """Ask the job to stop; of an older version's job the process group, because its shell only waits."""
        asked = [self.process] if self.token else [m for m in self.members() if _group(m.pid) == self.process.pid]
        for process in asked:
            processes.send(process, signal.SIGTERM)

    def ask_to_end(self) -> bool:
        """Ask ``hlatctl.node`` to end the job at once; return whether it was asked."""
        return bool(self.token) and processes.send(self.process, signal.SIGQUIT)


def paths(handle: Handle) -> tuple[Path, Path]:
    """Return the two files of a job."""
    base = Path(handle.launch_dir) / handle.name
    return node.record(base, "pid"), node.record(base, "exit_code")


def started(handle: Handle) -> Record | None:
    """Return a job that was started; None: it was not, or its process can't be identified.

    If its record is missing or damaged, a running job is found by the command line of its ``hlatctl.node``.
    """
    record = recorded(handle)
    if record and processes.alive(record.process):
        return record
    return _running(handle) or record


def recorded(handle: Handle) -> Record | None:
    """Return the job of the start record; None: there is no usable record."""
    value = _read(paths(handle)[0])
    if isinstance(value, int):
        return _old(handle, value)
    try:
        process = Identity(pid=int(value["pid"]), started=str(value["started"]), boot_id=str(value["boot_id"]))
        return Record(process=process, token=str(value["token"]))
    except DAMAGED:
        return None


def exit_code(handle: Handle) -> int | None:
    """Return the exit code of a job that has ended and left one."""
    value = _read(paths(handle)[1])
    try:
        return int(value["code"]) if isinstance(value, dict) else None if value is None else int(value)
    except DAMAGED:
        return None


def _running(handle: Handle) -> Record | None:
    base = os.fspath(Path(handle.launch_dir) / handle.name)
    for process in processes.with_words("-m", "hlatctl.node", base):
        tokens = (processes.job_of(pid) for pid in processes.descendants(process.pid))
        return Record(process=process, token=next(filter(None, tokens), ""))
    return None


def _old(handle: Handle, pid: int) -> Record | None:
    process = processes.identify(pid)
    if process is None or processes.command_line(pid) != ("/bin/sh", f"{handle.launch_dir}/{handle.name}.sh"):
        return None
    return Record(process=process, token="")


def _read(path: Path) -> Any:
    try:
        return files.read_json(path)
    except (OSError, *DAMAGED):
        return None


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
