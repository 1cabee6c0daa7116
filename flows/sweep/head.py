"""Driving a sweep from wherever it stands: asks for trials, starts them, compares them, ends those that fall behind.

Everything is journalled before it is done, so that a head which dies at any point leaves a journal from which the next
one goes on: an asked trial gets its run directory once, a running one is watched again, an ended one is never touched.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from conf import axes
from conf.schema import Config
from conf.variations import Variations
from flows import pretrain
from flows.signals import Signals
from flows.sweep import signs
from flows.sweep.objective import check, objective
from flows.sweep.study import Study
from flows.sweep.trials import Trial
from hlatctl.run.errors import ConfigError, HlatctlError, LaunchError, StoppedError, TrainingError
from hlatctl.run.journal import FLOW_WRITER, JournalTail, JournalWriter
from hlatctl.run.lease import hold_head
from hlatctl.run.paths import SweepPaths
from hlatctl.run.sweep import SweepState, TrialState, apply

#: A trial whose head process is gone so often, with nothing in its journal that says why, has failed.
_MAX_LOST_HEADS = 3
#: Played trials at once: they wait for the disk more than they compute.
_PLAYED_AT_ONCE = 8
_POLL_S = 0.5
_PLAYED_POLL_S = 0.02


def drive(sweep: SweepPaths, say: Callable[[str], None]) -> SweepState:
    """Bring a sweep to its end from wherever it stands.

    Args:
        sweep: its directory.
        say: told a sentence for whoever watches.

    Raises:
        RunBusyError: another process drives it.
        StoppedError: it was stopped on request and can be resumed.
        ConfigError: no trial reports the objective.
        TrainingError: every trial has failed.
    """
    with hold_head(sweep):
        head = _Head(sweep, say)
        try:
            return head.run()
        finally:
            head.close()


class _Head:
    """The process that drives a sweep. Threads that play trials look in too: what they share is under one lock."""

    def __init__(self, sweep: SweepPaths, say: Callable[[str], None]) -> None:
        self._sweep, self._say = sweep, say
        self._space = axes.load(sweep.space)
        self._settings = self._space.settings
        self._state = SweepState()
        self._tail = JournalTail(sweep)
        self._journal = JournalWriter(sweep, FLOW_WRITER)
        self._lock = threading.RLock()
        self._signals = Signals()
        self._running: dict[int, Trial] = {}
        self._unreported: ConfigError | None = None
        self._refresh()
        self._variations = Variations(self._space.overrides, Path(self._space.folder), os.fspath(sweep.root.parent))
        self._player = ThreadPoolExecutor(_PLAYED_AT_ONCE) if self._state.simulated else None
        self._waiting = [trial.number for trial in self._trials() if not trial.ended]

    def close(self) -> None:
        """Wait for trials that are played, and release the journal."""
        if self._player is not None:
            self._player.shutdown()
        self._journal.close()

    def run(self) -> SweepState:
        """All of it."""
        if self._all_done():
            self._say(f"sweep {self._sweep.run_id} is finished")
            return self._state
        self._event("head_started", pid=os.getpid(), host=platform.node())
        first = self._variations.compose(self._space.example())
        self._objective = objective(self._settings, first)
        self._study = Study(
            self._space, self._state, minimize=self._objective.minimize, seed=first.seed,
            first_rung_tokens=self._objective.rungs(first, self._settings.rungs)[0],
            path=None if self._player else self._sweep.study,
        )  # fmt: skip
        self._adopt()
        with self._signals.kept():
            self._loop()
        return self._finish()

    def _loop(self) -> None:
        while True:
            try:
                self._signals.check()
                self._refresh()
                for trial in list(self._running.values()):
                    if not (trial.is_played and trial.alive):
                        self._look(trial)
                if self._ending:
                    self._pause_all()
                else:
                    self._fill()
                if not self._running and (self._ending or self._all_done()):
                    return
                time.sleep(_PLAYED_POLL_S if self._player else _POLL_S)
            except KeyboardInterrupt:
                self._signals.take()
                if self._state.stop_requested:
                    raise
                self._event("stop_requested", by="interrupt")

    @property
    def _ending(self) -> bool:
        return self._state.stop_requested or self._unreported is not None

    def _all_done(self) -> bool:
        return not self._waiting and not self._running and self._next_arm() is None

    def _finish(self) -> SweepState:
        state = self._state
        if self._unreported is not None:
            self._event("sweep_finished", outcome="failed", message=self._unreported.message)
            raise self._unreported
        if state.stop_requested and not self._all_done():
            message = f"sweep {self._sweep.run_id}: stopped, {self._told()}"
            self._event("sweep_finished", outcome="stopped", message=message)
            raise StoppedError(message, hint=f"hlatctl resume {self._sweep.run_id}")
        if state.count("failed") == len(state.trials):
            message = f"sweep {self._sweep.run_id}: every trial has failed, the first with: {state.trials[0].why}"
            self._event("sweep_finished", outcome="failed", message=message)
            raise TrainingError(message, hint=f"hlatctl status {state.trials[0].run_id}")
        self._event("sweep_finished", outcome="finished", message=self._told())
        return self._state

    def _told(self) -> str:
        statuses = ("finished", "pruned", "diverged", "failed", "paused")
        counts = [f"{self._state.count(status)} {status}" for status in statuses if self._state.count(status)]
        return f"{len(self._state.trials)} of {self._space.trials} trials asked for" + (
            f": {', '.join(counts)}" if counts else ""
        )

    # Asking and starting

    def _adopt(self) -> None:
        """Watch again what still runs; a trial that is not driven by anybody waits for its turn."""
        for number in list(self._waiting):
            trial = self._trial(number)
            if trial is not None and trial.alive:
                self._waiting.remove(number)
                self._running[number] = trial
                self._say(f"{trial.run.run_id}: still running, re-attached")
                if self._state.trials[number].status == "stopping":
                    trial.request_stop(self._sweep.run_id)

    def _fill(self) -> None:
        """Start trials, first come, first served, while there are slots."""
        slots = max(_PLAYED_AT_ONCE, self._settings.parallel) if self._player else self._settings.parallel
        while len(self._running) < slots:
            if not self._waiting and not self._ask():
                return
            number = self._waiting[0]
            trial = self._trial(number)
            if trial is not None and any(trial.prepares_alike(other) for other in self._running.values()):
                return  # when that is prepared, it is there for both
            self._waiting.pop(0)
            if trial is not None:
                self._begin(trial)

    def _ask(self) -> bool:
        """Ask for one more trial; False if there is none."""
        with self._lock:
            following = self._next_arm()
            if following is None:
                return False
            number, (arm, point) = len(self._state.trials), following
            point = self._study.draw(arm) if point is None else point
            overrides = [*self._space.overrides, *(f"{key}={value}" for key, value in point.items())]
            seed = None
            if self._settings.seeds > 1:
                seed = self._seed_of(point) + sum(trial.arm == arm for trial in self._trials())
                overrides.append(f"seed={seed}")
            self._event(
                "trial_asked", trial=number, run_id=self._sweep.trial(number).run_id, arm=arm, point=point, seed=seed,
                overrides=overrides,
            )  # fmt: skip
            self._study.add(self._state.trials[number])
            self._waiting.append(number)
        return True

    def _next_arm(self) -> tuple[int, dict[str, str] | None] | None:
        """Number and point of the next trial's arm, the point being None if it is to be drawn; None at the end."""
        trials = list(self._trials())
        if trials and sum(trial.arm == trials[-1].arm for trial in trials) < self._settings.seeds:
            return trials[-1].arm, trials[-1].point
        arm = trials[-1].arm + 1 if trials else 0
        if self._space.sampler == "grid":
            tried = {tuple(trial.point.items()) for trial in trials}
            point = next((point for point in self._space.grid() if tuple(point.items()) not in tried), None)
            return None if point is None else (arm, point)
        return (arm, None) if arm < self._space.arms else None

    def _seed_of(self, point: dict[str, str]) -> int:
        try:
            return self._variations.compose(point).seed
        except ConfigError:
            return 0  # the trial will say what is wrong

    def _trial(self, number: int) -> Trial | None:
        """What looks after a trial; None if it can't be run, and has failed by that."""
        asked = self._state.trials[number]
        try:
            config = self._config(asked)
            check(self._objective, config)
        except HlatctlError as error:
            self._end(asked, "failed", error.message)
            return None
        of = pretrain.TrialOf(sweep=self._sweep.run_id, trial=number)
        return Trial(self._sweep.trial(number), config, of, sys.argv, self._player)

    def _config(self, asked: TrialState) -> Config:
        seed = {} if asked.seed is None else {"seed": str(asked.seed)}
        return self._variations.compose({**asked.point, **seed})

    def _begin(self, trial: Trial) -> None:
        """Start a trial, or see to one that has ended while nobody looked."""
        asked = self._state.trials[trial.of.trial]
        ended = trial.state.status in ("finished", "failed", "stopped")
        self._running[asked.number] = trial
        if ended and not (asked.status == "paused" and trial.state.status == "stopped"):
            return
        self._event("trial_started", durable=False, trial=asked.number, run_id=trial.run.run_id)
        self._say(f"{trial.run.run_id}: started, {_text(asked)}")
        try:
            trial.start(partial(self._look_in, trial))
        except LaunchError as error:
            if trial.alive:
                return  # another process was quicker
            self._end(asked, "failed", error.message)
            del self._running[asked.number]
            return
        if asked.status == "stopping":  # what was asked for before its head began is forgotten
            trial.request_stop(self._sweep.run_id)

    # Watching

    def _look_in(self, trial: Trial) -> None:
        """From the thread that plays it."""
        with self._lock:
            self._compare(trial)

    def _look(self, trial: Trial) -> None:
        with self._lock:
            alive = trial.alive  # first: what it wrote before it ended is then read
            self._compare(trial)
            if not alive:
                trial.end_of_play()
                self._conclude(trial)

    def _compare(self, trial: Trial) -> None:
        """Journal what is new of the objective, and end the trial if it falls behind or diverges."""
        state, asked = trial.refresh(), self._state.trials[trial.of.trial]
        rungs = self._objective.rungs(trial.config, self._settings.rungs)
        for tokens, value in self._objective.values(state, rungs).items():
            if tokens in asked.rungs:
                continue
            self._event("trial_rung", durable=False, trial=asked.number, tokens=tokens, value=value)
            behind = self._study.report(asked.number, tokens, value)
            if behind and tokens < rungs[-1]:
                self._stop_early(trial, asked, "pruned", f"{self._settings.pruner} at {tokens:,} tokens: {value:.4f}")
        diverges = signs.divergence(state) if self._settings.stop_diverged and asked.status == "running" else ""
        if diverges and state.status == "running":
            self._stop_early(trial, asked, "diverged", diverges)

    def _stop_early(self, trial: Trial, asked: TrialState, outcome: str, why: str) -> None:
        if asked.status != "running" or trial.state.status != "running":
            return
        self._event("trial_stopping", trial=asked.number, outcome=outcome, why=why)
        trial.request_stop(self._sweep.run_id)
        self._say(f"{trial.run.run_id}: {outcome}, {why}")

    def _pause_all(self) -> None:
        for number, trial in self._running.items():
            if self._state.trials[number].status in ("asked", "running") and trial.alive:
                self._event("trial_paused", trial=number)
                trial.request_stop(self._sweep.run_id)

    def _conclude(self, trial: Trial) -> None:
        """What the end of a trial's process means."""
        asked, state = self._state.trials[trial.of.trial], trial.state
        del self._running[asked.number]
        if state.status == "finished":
            self._conclude_finished(trial, asked)
        elif state.status == "failed":
            diverged = signs.divergence(state) if self._settings.stop_diverged else ""
            self._end(asked, "diverged" if diverged else "failed", diverged or state.message, trial)
        elif asked.status == "paused":
            return
        elif state.status == "stopped":
            self._end(asked, asked.stops_as or "pruned", asked.why or "stopped by hand", trial)
        else:
            self._event("trial_head_lost", trial=asked.number)
            if asked.lost_heads >= _MAX_LOST_HEADS:
                self._end(asked, "failed", f"its process was gone {asked.lost_heads} times, see logs/head.log", trial)
            else:
                self._waiting.insert(0, asked.number)

    def _conclude_finished(self, trial: Trial, asked: TrialState) -> None:
        last = self._objective.rungs(trial.config, self._settings.rungs)[-1]
        value = asked.rungs.get(last)
        if value is not None and math.isfinite(value):
            self._end(asked, "finished", "", trial, value)
            return
        reported = sorted({name for m in trial.state.milestones.values() for name in m.scores})
        why = f"sweep.objective={self._objective.name}: {trial.run.run_id} has finished and does not report it"
        self._end(asked, "failed", f"{why} as a number", trial)
        if value is None and not any(other.value is not None for other in self._trials()):
            self._unreported = ConfigError(why, hint=f"it reports {', '.join(reported) or 'loss alone'}")

    def _end(
        self, asked: TrialState, outcome: str, why: str, trial: Trial | None = None, value: float | None = None
    ) -> None:
        early = outcome in ("pruned", "diverged")
        if trial is not None and early and not self._settings.keep_pruned_checkpoints:
            trial.drop_checkpoints()
        self._event(
            "trial_ended", trial=asked.number, outcome=outcome, why=why, value=value,
            tokens=trial.state.tokens if trial else 0, process_hours=trial.process_hours if trial else 0.0,
            saved_process_hours=trial.left_process_hours if trial and early else 0.0,
        )  # fmt: skip
        self._study.tell(asked)
        told = why if value is None else f"{self._objective.name} {value:.4f}"
        self._say(f"{asked.run_id}: {outcome}, {told} ({self._state.count(*_ENDED)} of {self._space.trials})")

    # The journal

    def _event(self, kind: str, *, durable: bool = True, **fields: Any) -> None:
        with self._lock:
            self._journal.append(kind, durable=durable, **fields)
            self._refresh()

    def _refresh(self) -> None:
        with self._lock:
            for event in self._tail.read_new():
                apply(self._state, event)

    def _trials(self) -> list[TrialState]:
        return [self._state.trials[number] for number in sorted(self._state.trials)]


_ENDED = ("finished", "pruned", "diverged", "failed")


def _text(asked: TrialState) -> str:
    seed = [] if asked.seed is None else [f"seed={asked.seed}"]
    return " ".join([*(f"{key}={value}" for key, value in asked.point.items()), *seed])
