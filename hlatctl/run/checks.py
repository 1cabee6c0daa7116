"""The result of one check of a machine. Standard library only: every package uses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "skip"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check and its result.

    Args:
        status: ``skip``: the check can't be made here; ``shows`` says why.
        shows: finding or problem.
        command: the command that shows the same; empty if there is none.
        values: the measurements, with units in their names.
    """

    name: str
    status: Status
    shows: str
    command: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, problem: str, shows: str, *, command: str = "", values: dict[str, Any] | None = None
    ) -> Check:
        """Return a check that failed if ``problem`` is not empty."""
        status: Status = "fail" if problem else "pass"
        return cls(name=name, status=status, shows=problem or shows, command=command, values=values or {})
