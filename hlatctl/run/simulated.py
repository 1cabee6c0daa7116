"""The words that mark simulated runs and sweeps."""

from __future__ import annotations

#: In names, progress lines and lists.
MARK = "SIMULATED"
#: Beside the name of an existing run.
NOTE = f"{MARK}: nothing was trained"
#: First line of commands that simulate.
WARNING = f"{MARK}: nothing is trained, and every number is made up"
#: Above a report.
REPORT = "nothing was trained; every number below is made up."


def noted(name: str, *, simulated: bool) -> str:
    """Return the name of a run or a sweep, with a note if it is simulated."""
    return f"{name}  {NOTE}" if simulated else name


def marked(name: str, *, simulated: bool) -> str:
    """Return the name of a run or a sweep, with a mark if it is simulated, for lists."""
    return f"{name} ({MARK})" if simulated else name


def leading(text: str, *, simulated: bool) -> str:
    """Return a line of progress, with a mark before it if the run is simulated."""
    return f"{MARK} · {text}" if simulated else text
