"""How a job ended that the scheduler has forgotten, from Slurm's accounting, where there is one."""

from __future__ import annotations

import subprocess
from datetime import datetime
from typing import Any

from flows.launch.slurm.commands import Row

#: A database that does not answer must not delay a run.
_TIMEOUT_S = 10.0
#: A job may seem to be submitted before its script was written: clocks of hosts differ.
_EARLIER_S = 60.0
#: The name is last: it may hold a "|".
_FORMAT = "JobIDRaw,State,Reason,Comment,NodeList,Start,JobName"
_FIELDS = 7
#: The answer of a cluster without accounting.
_NONE = "accounting storage is disabled"


class Accounting:
    """Asks ``sacct``; after an answer that there is no accounting, never again."""

    def __init__(self) -> None:
        self._there = True
        self._known: dict[str, Row] = {}

    def job(self, name: str, token: str, since_unix_s: float) -> Row | None:
        """Return the newest job of a name that was submitted since then; None if there is none, or no answer.

        Args:
            name: of the job. It identifies the job: accounting keeps no comments by default.
            token: the job's comment, if accounting keeps comments.
            since_unix_s: before the job was submitted.
        """
        if token not in self._known:
            rows = [row for row in self._ask(name, since_unix_s) if row.name == name and row.comment in ("", token)]
            if not rows:
                return None
            self._known[token] = max(rows, key=lambda row: int(row.id))
        return self._known[token]

    def _ask(self, name: str, since_unix_s: float) -> list[Row]:
        if not self._there:
            return []
        since = datetime.fromtimestamp(since_unix_s - _EARLIER_S).isoformat(timespec="seconds")
        options = ("--allocations", "--noheader", "--parsable2", f"--format={_FORMAT}")
        code, text = sacct(*options, f"--name={name}", f"--starttime={since}")
        self._there = _NONE not in text
        return [_row(line) for line in text.splitlines()] if code == 0 else []


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


def _row(line: str) -> Row:
    """Return a job; sacct adds who cancelled it, and words instead of no nodes."""
    id_, state, reason, comment, nodes, start, name = line.split("|", _FIELDS - 1)
    nodes = "" if nodes == "None assigned" else nodes
    return Row(id=id_, state=state.split()[0], reason=reason, comment=comment, nodes=nodes, start=start, name=name)
