"""One thing looked at on a machine, and what came of it; standard library only, for every room."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "skip"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check that was made.

    Args:
        name: in a few words.
        command: what a person types to see the same; empty if there is no such command.
        status: ``skip``: it could not be made here, ``shows`` says why.
        shows: what was found, or what is wrong.
        values: what was measured, for machines to read; quantities carry their unit in the name.
    """

    name: str
    status: Status
    shows: str
    command: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def judged(
        cls, name: str, problem: str, shows: str, *, command: str = "", values: dict[str, Any] | None = None
    ) -> Check:
        """Passed if there is no problem."""
        status: Status = "fail" if problem else "pass"
        return cls(name=name, status=status, shows=problem or shows, command=command, values=values or {})
