"""How a job is handed over to what the job before has left on this machine. Standard library only.

The launcher writes it to a file. ``hlatctl.node`` reads that, and sends it to ``trainer.launch``, which has imported
everything and forks the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: The end of a job after which what it has imported stays for the next one: training follows a preflight that passed,
#: and either of them follows training that failed. Empty: nothing stays.
Stays = Literal["", "passed", "failed"]
#: Names the descriptor over which ``trainer.launch`` tells the node's program the exit code of each job, and gets the
#: next one, which it answers with ``FORKED``.
FORKS_ENV, FORKED = "HLATCTL_FORKS", b"forked"
MESSAGE_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Following:
    """The next job.

    Args:
        base: path prefix of its records.
        command: its command; everything that it imports before it forks was imported for the first job too.
        env: variables that its script would set.
        log: file for its output.
        stays: the end after which its processes stay in turn.
    """

    base: str
    command: list[str]
    env: dict[str, str]
    log: str
    stays: Stays


def stays_after(stays: str, code: int) -> bool:
    """Return whether what a job has imported stays after an exit code."""
    return stays == ("failed" if code else "passed")


def following_file(folder: Path) -> Path:
    """Return the file for the next job, in the private folder of the node's program: no other user can write it."""
    return folder / "following.json"
