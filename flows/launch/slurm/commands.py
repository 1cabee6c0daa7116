"""Slurm's own commands: what they answer, or that the scheduler does not answer."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass

from hlatctl.run.errors import LaunchError

#: Between two questions to the scheduler, which serves a whole cluster; records on the disk answer sooner.
_ASK_EVERY_S = 10.0
_FIRST_ASK_S = 0.5
#: Of every job of ours: id, state, reason, comment, nodes, expected start, name. The name is last: it may hold a "|".
_FORMAT = "%i|%T|%r|%k|%N|%S|%j"
_FIELDS = 7


class SchedulerAwayError(LaunchError):
    """The scheduler does not answer: nothing may be concluded about its jobs."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A job as the scheduler knows it; see squeue(1)."""

    id: str
    state: str
    reason: str
    comment: str
    nodes: str
    start: str
    name: str


def slurm(*words: str) -> str:
    """Run one of Slurm's commands; its output.

    Raises:
        SchedulerAwayError: the scheduler does not answer.
        LaunchError: it refuses, or there is no such command here.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise LaunchError(
            f"{words[0]}: no such command on this machine",
            hint="run hlatctl where Slurm's commands are, such as a login node (`hlatctl doctor`)",
        ) from None
    if done.returncode:
        raise _error(words[0], done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout


def scancel(*words: str) -> None:
    """Signal or end jobs. Its exit code says nothing: for a job that is just ending it is an error."""
    subprocess.run(("scancel", *words), capture_output=True, check=False, stdin=subprocess.DEVNULL)


class Queue:
    """The jobs of this user, as the scheduler told last. Asks in the background: an absent scheduler takes 20 s."""

    def __init__(self) -> None:
        self._asking: subprocess.Popen[str] | None = None
        self._asked_s, self._every_s = -_ASK_EVERY_S, _FIRST_ASK_S
        self._rows: list[Row] | None = None

    def job(self, name: str, token: str, *, now: bool = False) -> Row | None:
        """The newest job of a name and a token (none: of any); None if the scheduler knows of none.

        Args:
            now: ask now and wait for the answer.

        Raises:
            SchedulerAwayError: the scheduler's last answer was none.
        """
        rows = self._newest(now=now)
        known = [row for row in rows if row.name == name and token in ("", row.comment)]
        return max(known, key=lambda row: int(row.id.partition("_")[0]), default=None)

    def hurry(self) -> None:
        """Ask soon: a job has just been submitted or ended."""
        self._asked_s, self._every_s = -_ASK_EVERY_S, _FIRST_ASK_S

    def _newest(self, *, now: bool) -> list[Row]:
        if now or (self._asking is None and time.monotonic() - self._asked_s > self._every_s):
            self._start()
        if self._asking and (now or self._asked_s < 0 or self._asking.poll() is not None):
            self._finish()
        if self._rows is None:
            raise SchedulerAwayError("squeue: the scheduler does not answer", hint="see `sinfo` and `scontrol ping`")
        return self._rows

    def _start(self) -> None:
        if self._asking:
            self._asking.kill()
            self._asking.communicate()
        words = ("squeue", "--noheader", "--me", "--states=all", f"--format={_FORMAT}")
        self._asking = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )

    def _finish(self) -> None:
        assert self._asking
        output, _ = self._asking.communicate()
        self._rows = None if self._asking.returncode else [_row(line) for line in output.splitlines()]
        self._asked_s, self._every_s = time.monotonic(), min(self._every_s * 2, _ASK_EVERY_S)
        self._asking = None


def _row(line: str) -> Row:
    id_, state, reason, comment, nodes, start, name = line.split("|", _FIELDS - 1)
    return Row(id=id_, state=state, reason=reason, comment=comment, nodes=nodes, start=start, name=name)


def _error(command: str, text: str) -> LaunchError:
    if "Unable to contact slurm controller" in text or "Connection refused" in text or "timed out" in text:
        return SchedulerAwayError(f"{command}: {text}", hint="see `scontrol ping`; the run can be resumed")
    return LaunchError(f"{command}: {text}", hint="see `sinfo` and `scontrol show partition`")
