"""A sweep's journal and what follows from it: the sweep's state, the next trial, and which trial falls behind.

Threads that simulate trials call ``Book`` too, so each method that changes something holds a lock.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from conf import space as spaces
from conf.schema import Config
from conf.space import Space, Variations
from flows.sweep.study import Study, objective
from hlatctl.run.journal import FLOW_WRITER, JournalTail, JournalWriter
from hlatctl.run.paths import SweepPaths
from hlatctl.run.sweep import ENDED, SweepState, TrialState, apply


class Book:
    """A sweep's journal, opened for writing.

    Raises:
        ConfigError: ``sweep.yaml`` is damaged.
        RunBusyError: another process writes the journal.
    """

    def __init__(self, sweep: SweepPaths) -> None:
        self.sweep = sweep
        self.space = spaces.load(sweep.space)
        self.settings = self.space.settings
        self.state = SweepState()
        self.lock = threading.RLock()
        self.variations = _variations(sweep, self.space)
        self._tail = JournalTail(sweep)
        self._journal = JournalWriter(sweep, FLOW_WRITER)
        self.refresh()
        self.example = example = self.variations.compose(self.space.example())
        self.objective = objective(self.settings, example)
        self._study = Study(
            self.space,
            self.state,
            minimize=self.objective.minimize,
            seed=example.seed,
            first_rung_tokens=self.objective.rungs(example, self.settings.rungs)[0],
            path=None if self.state.simulated else sweep.study,
        )

    def close(self) -> None:
        """Release the journal."""
        self._journal.close()

    @property
    def trials(self) -> list[TrialState]:
        """All trials so far, by number."""
        return [self.state.trials[number] for number in sorted(self.state.trials)]

    def event(self, kind: str, *, durable: bool = True, **fields: Any) -> None:
        """Journal an event and apply it to the state."""
        with self.lock:
            self._tail.add(self._journal.append(kind, durable=durable, **fields), FLOW_WRITER)
            self.refresh()

    def refresh(self) -> None:
        """Apply what other processes have written to the state."""
        with self.lock:
            if self._journal.unwritten:
                self._journal.flush()
            for event in self._tail.read_new():
                apply(self.state, event)

    def next_arm(self) -> tuple[int, dict[str, str] | None] | None:
        """Return number and point of the next trial's arm, or None at the end. The point is None if Optuna draws it."""
        trials = self.trials
        if trials and sum(trial.arm == trials[-1].arm for trial in trials) < self.space.seeds_of(trials[-1].arm):
            return trials[-1].arm, trials[-1].point
        arm = trials[-1].arm + 1 if trials else 0
        if self.space.sampler == "grid":
            tried = {tuple(trial.point.items()) for trial in trials}
            point = next((point for point in self.space.grid() if tuple(point.items()) not in tried), None)
            return None if point is None else (arm, point)
        return (arm, None) if arm < self.space.arms else None

    @property
    def rungs_ended(self) -> bool:
        """Whether all rungs of a ladder have ended, so that its target can be forecast; False in a sweep."""
        target = self.space.target
        if target is None or not all(trial.ended for trial in self.trials):
            return False
        following = self.next_arm()
        return following is None or following[0] == target

    def ask(self) -> int | None:
        """Journal the next trial and return its number; None if there is none, or if it waits for a forecast."""
        with self.lock:
            following = self.next_arm()
            if following is None or (following[0] == self.space.target and self.state.forecast is None):
                return None
            # Not the number of trials: the line of an earlier one may be damaged.
            number, (arm, point) = max(self.state.trials, default=-1) + 1, following
            point = self._study.draw(arm) if point is None else point
            overrides = [*self.space.overrides, *(f"{key}={value}" for key, value in point.items())]
            seed = None
            if self.space.seeds_of(arm) > 1:
                seed = self._study.seed + sum(trial.arm == arm for trial in self.trials)
                overrides.append(f"seed={seed}")
            self.event(
                "trial_asked",
                trial=number,
                run_id=self.sweep.trial(number).run_id,
                arm=arm,
                point=point,
                seed=seed,
                overrides=overrides,
            )
            self._study.add(self.state.trials[number])
            return number

    def rung(self, number: int, tokens: int, value: float) -> bool:
        """Journal a trial's objective at a rung; return whether the pruner would end the trial."""
        with self.lock:
            self.event("trial_rung", durable=False, trial=number, tokens=tokens, value=value)
            return self._study.report(number, tokens, value)

    def end(self, number: int, outcome: str, why: str, **fields: Any) -> None:
        """Journal a trial's end.

        Args:
            outcome: ``finished``, ``pruned``, ``diverged`` or ``failed``.
            why: reason, if the trial has not finished.
            fields: further fields of the event; the defaults are zeros.
        """
        nothing = {"value": None, "tokens": 0, "process_hours": 0.0, "saved_process_hours": 0.0}
        with self.lock:
            self.event("trial_ended", trial=number, outcome=outcome, why=why, **(nothing | fields))
            self._study.tell(self.state.trials[number])

    def summary(self) -> str:
        """Return the number of trials in words, in total and by status."""
        counts = [f"{n} {status}" for status in (*ENDED, "paused") if (n := self.state.count(status))]
        return f"{len(self.state.trials)} of {self.space.trials} trials" + (f": {', '.join(counts)}" if counts else "")


def example(sweep: SweepPaths) -> Config:
    """Return the configuration of one arm of a sweep.

    Raises:
        ConfigError: ``sweep.yaml`` is damaged.
    """
    space = spaces.load(sweep.space)
    return _variations(sweep, space).compose(space.example())


def _variations(sweep: SweepPaths, space: Space) -> Variations:
    return Variations(space.overrides, Path(space.folder), os.fspath(sweep.root.parent), space.config_dirs)
