"""The profiles of a run, and what its processes left of hangs: what to open, and where it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hlatctl.run.hangs import answered
from hlatctl.run.paths import RunPaths
from hlatctl.run.profiles import table_name, trace_name
from hlatctl.run.state import RunState
from hlatctl.units import size

#: Of thousands of processes; their folder has all.
_MOST_FILES = 8


@dataclass(frozen=True)
class Look:
    """One profile, or the evidence of one hang.

    Args:
        name: such as ``profile 1``.
        text: what it is.
        folder: of its files, below the run directory.
        files: the names of those to open first.
    """

    name: str
    text: str
    folder: Path
    files: list[str]


def looks(run: RunPaths, state: RunState) -> list[Look]:
    """Return the profiles and the evidence of hangs whose files exist."""
    found = []
    for profile in state.profiles:
        steps = f"steps {profile.first_step:,} to {profile.last_step:,}, {size(profile.bytes)}"
        names = [name for rank in profile.ranks for name in (trace_name(rank), table_name(rank))]
        found.append(Look(f"profile {profile.number}", steps, run.profile(profile.number), names))
    for attempt in state.attempts:
        if attempt.hang and (folder := run.hang(attempt.number)).is_dir():
            text, names = f"stacks of {answered(folder)} processes", sorted(path.name for path in folder.iterdir())
            found.append(Look(f"hang of attempt {attempt.number}", text, folder, names[:_MOST_FILES]))
    there = (look for look in found if look.folder.is_dir())
    return [replace(look, folder=look.folder.relative_to(run.root)) for look in there]
