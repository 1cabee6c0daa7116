"""The names of the files that training processes leave of a hang, in ``RunPaths.hang``."""

from __future__ import annotations

from pathlib import Path


def stacks_name(rank: int) -> str:
    """Return the name of the stacks of a process's threads."""
    return f"rank-{rank:05d}.stacks.txt"


def collectives_name(rank: int) -> str:
    """Return the name of the newest collectives of a process."""
    return f"rank-{rank:05d}.collectives.json"


def answered(folder: Path) -> int:
    """Return how many processes have left their stacks."""
    return sum(1 for _ in folder.glob("rank-*.stacks.txt"))
