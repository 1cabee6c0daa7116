"""What a local job leaves on disk, read: which process it is, what belongs to it, and its exit code.

``hlatctl.node`` writes both files as JSON. Scripts of older versions wrote process id and exit code as bare numbers. A
bare process id counts only while that process still runs this very script.
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
    """A job that has been started on this machine.

    Args:
        process: the node's program, or an old job's shell.
        token: of the job's processes; empty for an old job, whose processes are found only below its shell.
    """

    process: Identity
    token: str

    def members(self) -> list[Identity]:
        """The job's processes that still run."""
        if self.token:
            return [process for process in (*processes.of_job(self.token), self.process) if processes.alive(process)]
        if not processes.alive(self.process):
            return []
        below = (processes.identify(pid) for pid in processes.descendants(self.process.pid))
        return [self.process, *(process for process in below if process)]

    def ask_to_stop(self) -> None:
        """Ask the job to stop; an old job's shell only waits, so its process group is asked, as it used to be."""
        asked = [self.process] if self.token else [m for m in self.members() if _group(m.pid) == self.process.pid]
        for process in asked:
            processes.send(process, signal.SIGTERM)

    def ask_to_end(self) -> bool:
        """Tell the node's program to end the job at once; whether one heard it."""
        return bool(self.token) and processes.send(self.process, signal.SIGQUIT)


def paths(handle: Handle) -> tuple[Path, Path]:
    """The two files of a job."""
    base = Path(handle.launch_dir) / handle.name
    return node.record(base, "pid"), node.record(base, "exit_code")


def started(handle: Handle) -> Record | None:
    """The job as it was started; None if it was not, or if its process can't be told from a stranger's.

    A job whose record is missing or damaged is found by the command line of its node's program while that runs.
    """
    record = recorded(handle)
    if record and processes.alive(record.process):
        return record
    return _running(handle) or record


def recorded(handle: Handle) -> Record | None:
    """The job as its record says; None if there is no record that can be used."""
    value = _read(paths(handle)[0])
    if isinstance(value, int):
        return _old(handle, value)
    try:
        process = Identity(pid=int(value["pid"]), started=str(value["started"]), boot_id=str(value["boot_id"]))
        return Record(process=process, token=str(value["token"]))
    except DAMAGED:
        return None


def exit_code(handle: Handle) -> int | None:
    """The exit code of a job that has ended and left one."""
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
