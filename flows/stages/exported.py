"""The exported model of a milestone: its folder, and its removal if an evaluation fails before it measured anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hlatctl.run.lease import is_held
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState

#: Folders of what an evaluation has measured, in a milestone's folder and in those of further contracts.
_MEASURED = ("tasks", "answers")


def model_folder(run: RunPaths, milestone_tokens: int, own: str) -> Path:
    """Return the folder to which a milestone is exported.

    Args:
        run: the run directory.
        milestone_tokens: of the milestone.
        own: what keeps the models of two flows apart, which may evaluate the same milestone.
    """
    folder = run.own_model(milestone_tokens)
    return folder.with_name(f"{folder.name}{own}")


class Measured:
    """Says whether an evaluation has measured something at a milestone since this object was made."""

    def __init__(self, run: RunPaths, milestone_tokens: int) -> None:
        self._folder = run.eval(milestone_tokens)
        self._before = self._stored()

    @property
    def something(self) -> bool:
        """Whether scores or answers were stored."""
        return self._stored() != self._before

    def _stored(self) -> set[tuple[Path, int, int]]:
        """Return the stored files with their sizes and times of change; a run has some hundred for each milestone."""
        found = set()
        for path in (
            path for name in _MEASURED for way in (name, f"*/{name}") for path in self._folder.glob(f"{way}/*")
        ):
            with suppress(FileNotFoundError):  # another evaluator removes the answers of a task that it has scored
                found.add((path, (info := path.stat()).st_size, info.st_mtime_ns))
        return found


def remove_left_over(run: RunPaths, milestones: Iterable[MilestoneState]) -> None:
    """Remove the models that a dead driver of the run has left of evaluated milestones: they keep checkpoints.

    Those of milestones that are still to be evaluated are used again.
    """
    for milestone in milestones:
        if milestone.is_done and not is_held(run.eval_lease(milestone.milestone_tokens)):
            shutil.rmtree(run.own_model(milestone.milestone_tokens), ignore_errors=True)


def remove_unmeasured(run: RunPaths, milestone_tokens: int, own: str, measured: Measured) -> None:
    """Remove the exported model of a failed evaluation, which a corrected one would not use.

    It stays if the evaluation measured something, because the same command continues it, and while a process evaluates
    the milestone: a job that its scheduler has lost may still read the model.
    """
    if not measured.something and not is_held(run.eval_lease(milestone_tokens)):
        shutil.rmtree(model_folder(run, milestone_tokens, own), ignore_errors=True)
