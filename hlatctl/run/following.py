"""How the next attempt of a job is handed over to what the one before has left on this machine. Standard library only.

The launcher writes it to a file. ``hlatctl.node`` reads that, and sends it to ``trainer.launch``, which has imported
everything and forks the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Names the descriptor over which ``trainer.launch`` tells the node's program the exit code of each attempt that has
#: failed, and gets the next one, which it answers with ``FORKED``.
FORKS_ENV, FORKED = "HLATCTL_FORKS", b"forked"
MESSAGE_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Following:
    """The next attempt.

    Args:
        base: path prefix of its records.
        command: its command, which differs from the first attempt's in nothing that was imported.
        env: variables that its script would set.
        log: file for its output.
    """

    base: str
    command: list[str]
    env: dict[str, str]
    log: str


def following_file(folder: Path) -> Path:
    """Return the file for the next attempt, in the private folder of the node's program: no other user can write it."""
    return folder / "following.json"
