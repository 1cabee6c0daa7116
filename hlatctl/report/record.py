"""Everything that a run's report shows, read once from the run directory, for figures, tables and pages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conf.schema import Config
from hlatctl.report import drill
from hlatctl.report.contamination import Overlaps, read_overlaps
from hlatctl.report.drill import Drill
from hlatctl.report.goodput import Goodput, measure_goodput
from hlatctl.report.numbers import Numbers, numbers
from hlatctl.report.run_view import read_without_steps
from hlatctl.report.scores import RunCourses, read_courses
from hlatctl.report.signals import Signal, of_report
from hlatctl.run import continuations, files
from hlatctl.run.checkpoint import Drawn, drawn
from hlatctl.run.continuations import Kept
from hlatctl.run.errors import DamagedFileError
from hlatctl.run.paths import RunPaths, answered, table_name, trace_name
from hlatctl.run.state import RunState
from hlatctl.units import size

#: Maximum number of files named; the folder has those of all processes.
_MOST_FILES = 8


@dataclass(frozen=True)
class Look:
    """One profile, or the evidence of one hang.

    Args:
        name: display name such as ``profile 1``.
        folder: path below the run directory.
        files: names of the files to open first.
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


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run as its report shows it.

    Args:
        drilled: drill results; None if the run had no drill.
        texts: continuations of ``eval.prompts``, by milestone.
        signals: signal of each task; empty with fewer than three evaluated milestones.
        looks: profiles and evidence of hangs.
        overlaps: evaluation items in the corpus; None if it was never scanned.
        drawn: what was drawn from each source until a step, for the steps between stages and the newest checkpoint.
        provenance, dataset: the content of ``provenance.json`` and ``dataset.json``; empty if missing or damaged.
    """

    state: RunState
    config: Config
    numbers: Numbers
    time: Goodput
    courses: RunCourses
    drilled: Drill | None = None
    texts: Sequence[Kept] = ()
    signals: Sequence[Signal] = ()
    looks: Sequence[Look] = ()
    overlaps: Overlaps | None = None
    drawn: dict[int, list[Drawn]]
    provenance: dict[str, Any]
    dataset: dict[str, Any]


def read_record(run: RunPaths, config: Config) -> Record:
    """Return a run's record from the journal's current events."""
    state, events = read_without_steps(run)
    time = measure_goodput(events, config, state)
    state.run_id = state.run_id or run.run_id
    return Record(
        state=state,
        config=config,
        numbers=numbers(state, config),
        time=time,
        courses=read_courses(run, state),
        drilled=drill.drill(drill.read(run)),
        signals=of_report(state),
        texts=continuations.history(run, state.milestones),
        looks=looks(run, state),
        overlaps=read_overlaps(run, state),
        drawn=_drawn(run, state, config),
        provenance=_json(run.provenance),
        dataset=_json(run.dataset),
    )


def _drawn(run: RunPaths, state: RunState, config: Config) -> dict[int, list[Drawn]]:
    """Return what was drawn until the ends of the stages and the newest checkpoint, as far as these are on the disk."""
    sources = len(config.data.source_weights)
    found = {0: [Drawn()] * sources} if config.stages else {}
    for step in sorted({*(stage.last_step for stage in config.stages), *state.checkpoints[-1:]} if found else ()):
        if step in state.checkpoints:
            with suppress(DamagedFileError):
                found[step] = drawn(run.checkpoint(step), sources)
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        record = files.read_json(path)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
