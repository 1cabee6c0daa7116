"""How people are told that a run or a sweep is simulated: the one home of the words."""

from __future__ import annotations

#: Stands in names, in progress and in lists.
MARK = "SIMULATED"
#: Stands beside the name of a run that has begun.
NOTE = f"{MARK}: nothing was trained"
#: The first line of whatever simulates.
WARNING = f"{MARK}: nothing is trained, and every number is made up"
#: Stands above a report.
REPORT = "nothing was trained; every number below is made up."


def noted(name: str, *, simulated: bool) -> str:
    """The name of a run or a sweep, with a note if it is simulated."""
    return f"{name}  {NOTE}" if simulated else name


def marked(name: str, *, simulated: bool) -> str:
    """The name of a run or a sweep for lists of other programs, with a mark if it is simulated."""
    return f"{name} ({MARK})" if simulated else name


def leading(text: str, *, simulated: bool) -> str:
    """A line of progress, with a mark before it if what goes on is simulated."""
    return f"{MARK} · {text}" if simulated else text
