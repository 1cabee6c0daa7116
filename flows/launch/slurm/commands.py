"""Slurm's commands: ask the scheduler for the state of jobs and nodes, and accounting for jobs it has forgotten.

A scheduler that does not answer raises ``AwayError``, so that no caller mistakes silence for an answer.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from flows.launch.base import AwayError, Verdict
from hlatctl.driver_job import outside_of_jobs
from hlatctl.run.errors import LaunchError

#: Seconds between two queries to the scheduler, which serves a whole cluster; records on the disk answer sooner.
_ASK_EVERY_S = 10.0
_FIRST_ASK_S = 0.5
#: Seconds between two queries to a scheduler that does not answer.
_ASK_AGAIN_S = 1.0
_T = TypeVar("_T")
#: States of a waiting and of a running job (squeue(1), "JOB STATE CODES").
WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_FED")
RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
#: States of a job whose processes are stopped until somebody continues it.
PAUSES = ("SUSPENDED", "STOPPED")
#: Slurm's states of jobs that have ended (squeue(1), "JOB STATE CODES").
VERDICTS: dict[str, Verdict] = {
    "BOOT_FAIL": "node_failed",
    "CANCELLED": "cancelled",
    "DEADLINE": "time_limit",
    "NODE_FAIL": "node_failed",
    "OUT_OF_MEMORY": "out_of_memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "time_limit",
}
#: Fields of each of our jobs: id, state, reason, comment, nodes, expected start, host of the batch script, time left,
#: name. The name is last, because it may contain a "|".
_FORMAT = "%i|%T|%r|%k|%N|%S|%B|%L|%j"
_NAMES = ("id", "state", "reason", "comment", "nodes", "start", "batch_host", "left", "name")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job as the scheduler knows it; see squeue(1). Accounting doesn't know the last two fields."""

    id: str
    state: str
    reason: str
    comment: str
    nodes: str
    start: str
    name: str
    batch_host: str = ""
    left: str = ""


def slurm(*words: str) -> str:
    """Run one of Slurm's commands and return its output.

    Raises:
        AwayError: the scheduler does not answer.
        LaunchError: it refuses, or the command is not installed.
    """
    try:
        done = subprocess.run(
            words, env=outside_of_jobs(), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise LaunchError(
            f"{words[0]}: no such command on this machine",
            hint="run hlatctl where Slurm's commands are, such as a login node (`hlatctl doctor`)",
        ) from None
    if done.returncode:
        raise _error(words[0], done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout


def scancel(*words: str) -> None:
    """Signal or end jobs. The exit code is ignored: it is an error for a job that is just ending."""
    subprocess.run(("scancel", *words), capture_output=True, check=False, stdin=subprocess.DEVNULL)


def patiently(ask: Callable[[], _T]) -> _T:
    """Repeat a query until the scheduler answers."""
    while True:
        try:
            return ask()
        except AwayError:
            time.sleep(_ASK_AGAIN_S)


def node_states(*options: str) -> dict[str, str]:
    """Return the state of each node, as sinfo(1) names it; the options select the nodes."""
    lines = slurm("sinfo", "-h", "-N", *options, "-o", "%N|%T").splitlines()
    return dict(line.split("|", 1) for line in lines)


@lru_cache(maxsize=64)
def hosts_of(nodes: str) -> tuple[str, ...]:
    """Return the names in Slurm's expression for nodes, in its order, without querying the scheduler."""
    return tuple(slurm("scontrol", "show", "hostnames", nodes).split()) if nodes else ()


def own_jobs(*options: str) -> list[SlurmJob]:
    """Return the jobs of this user that squeue's options select."""
    text = slurm("squeue", "--noheader", "--me", f"--format={_FORMAT}", *options)
    return [_row(line) for line in text.splitlines()]


class Queue:
    """The jobs of this user, as of the scheduler's last answer. Queries run in the background: silence takes 20 s."""

    def __init__(self) -> None:
        self._asking: threading.Thread | None = None
        self._asked_s, self._every_s = -_ASK_EVERY_S, _FIRST_ASK_S
        self._rows: list[SlurmJob] | None = None

    def job(self, name: str, token: str, *, now: bool = False) -> SlurmJob | None:
        """Return the newest job of a name and a token (empty: any); None if the scheduler knows of none.

        Args:
            now: query now and wait for the answer.

        Raises:
            AwayError: the scheduler gave no answer.
        """
        rows = self._newest(now=now)
        known = [row for row in rows if row.name == name and token in ("", row.comment)]
        return max(known, key=lambda row: int(row.id.partition("_")[0]), default=None)

    def hurry(self) -> None:
        """Query soon, because a job has just been submitted."""
        self._asked_s, self._every_s = -_ASK_EVERY_S, _FIRST_ASK_S

    def _newest(self, *, now: bool) -> list[SlurmJob]:
        first = self._asked_s < 0
        if self._asking and (now or first):
            self._asking.join()
        if self._asking and not self._asking.is_alive():
            self._asking = None
        if now:
            self._ask()
        elif self._asking is None and time.monotonic() - self._asked_s > self._every_s:
            self._asking = threading.Thread(target=self._ask, name="squeue", daemon=True)
            self._asking.start()
            if first:
                self._asking.join()
        if self._rows is None:
            raise AwayError("squeue: the scheduler does not answer", hint="see `sinfo` and `scontrol ping`")
        return self._rows

    def _ask(self) -> None:
        try:
            self._rows = own_jobs("--states=all")
        except LaunchError:
            self._rows = None
        self._asked_s, self._every_s = time.monotonic(), min(self._every_s * 2, _ASK_EVERY_S)


def _row(line: str) -> SlurmJob:
    return SlurmJob(**dict(zip(_NAMES, line.split("|", len(_NAMES) - 1), strict=True)))


def _error(command: str, text: str) -> LaunchError:
    if "Unable to contact slurm controller" in text or "Connection refused" in text or "timed out" in text:
        return AwayError(f"{command}: {text}", hint="see `scontrol ping`; the run can be resumed")
    return LaunchError(f"{command}: {text}", hint="see `sinfo` and `scontrol show partition`")


#: A database that does not answer must not delay a run.
_TIMEOUT_S = 10.0
#: A job may seem to be submitted before its script was written, because clocks of hosts differ.
_EARLIER_S = 60.0
#: The name is last, because it may contain a "|".
_ACCOUNTING_FORMAT = "JobIDRaw,State,Reason,Comment,NodeList,Start,JobName"
_FIELDS = 7
#: The answer of a cluster without accounting.
_NONE = "accounting storage is disabled"


class Accounting:
    """Queries ``sacct``; once it answers that there is no accounting, never again."""

    def __init__(self) -> None:
        self._there = True
        self._known: dict[str, SlurmJob] = {}

    def job(self, name: str, token: str, since_unix_s: float) -> SlurmJob | None:
        """Return the newest job of a name that was submitted since a time; None if there is none, or no answer.

        Args:
            name: name of the job, which identifies it: accounting keeps no comments by default.
            token: the job's comment, if accounting keeps comments.
            since_unix_s: a time before the job was submitted.
        """
        if token not in self._known:
            rows = [row for row in self._ask(name, since_unix_s) if row.name == name and row.comment in ("", token)]
            if not rows:
                return None
            self._known[token] = max(rows, key=lambda row: int(row.id))
        return self._known[token]

    def _ask(self, name: str, since_unix_s: float) -> list[SlurmJob]:
        if not self._there:
            return []
        since = datetime.fromtimestamp(since_unix_s - _EARLIER_S).isoformat(timespec="seconds")
        options = ("--allocations", "--noheader", "--parsable2", f"--format={_ACCOUNTING_FORMAT}")
        code, text = sacct(*options, f"--name={name}", f"--starttime={since}")
        self._there = _NONE not in text
        return [_accounting_row(line) for line in text.splitlines()] if code == 0 else []


def sacct(*words: str) -> tuple[int, str]:
    """Return the exit code of ``sacct``, and its output or else its error."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(("sacct", *words), check=False, timeout=_TIMEOUT_S, **options)
    except FileNotFoundError:
        return 127, _NONE
    except subprocess.TimeoutExpired:
        return 1, "no answer"
    return done.returncode, done.stderr if done.returncode else done.stdout


def _accounting_row(line: str) -> SlurmJob:
    """Return a job; sacct adds who cancelled it, and prints words instead of an empty node list."""
    id_, state, reason, comment, nodes, start, name = line.split("|", _FIELDS - 1)
    nodes = "" if nodes == "None assigned" else nodes
    return SlurmJob(id=id_, state=state.split()[0], reason=reason, comment=comment, nodes=nodes, start=start, name=name)
