"""The driver of a sweep: it starts trials, compares them, and ends those that fall behind.

Every action is journalled before it is done. So a driver that dies at any point can be replaced by another one: a
trial gets its run directory once, a running trial is watched again, and an ended one is never touched.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from flows import pretrain
from flows.runtime.signals import Signals
from flows.stages.validate import refuse_simulation
from flows.sweep import report, signs
from flows.sweep.book import Book
from flows.sweep.objective import check
from flows.sweep.trials import Trial
from flows.tracking.follower import conclude_sweep
from flows.tracking.prefect_sweep import PrefectView
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, HlatctlError, LaunchError, StoppedError, TrainingError
from hlatctl.run.lease import driver_token, hold_driver
from hlatctl.run.paths import SweepPaths
from hlatctl.run.sweep import ENDED, SweepState, TrialState

#: A trial fails if its driver dies this often without a reason in its journal.
_MAX_LOST_DRIVERS = 3
#: Threads for simulated trials: more than one core can't be used.
_MOST_SIMULATED = 2
_POLL_S = 0.5
_SIMULATED_POLL_S = 0.02


def drive(sweep: SweepPaths, say: Callable[[str], None]) -> SweepState:
    """Drive a sweep to its end; start or resume it.

    Args:
        sweep: its directory.
        say: called with each message for the user.

    Raises:
        RunBusyError: it already has a driver.
        StoppedError: it was stopped on request and can be resumed.
        ConfigError: no trial reports the objective.
        TrainingError: every trial has failed.
    """
    with files.created_like(sweep.root), hold_driver(sweep):
        book = Book(sweep)
        player = ThreadPoolExecutor(_MOST_SIMULATED) if book.state.simulated else None
        try:
            return _Driver(book, say, player).run()
        finally:
            if player is not None:
                player.shutdown()
            book.close()


class _Driver:
    """The process that drives a sweep.

    Args:
        book: of the sweep.
        say: as for :func:`drive`.
        player: runs the simulated trials of a dry run.
    """

    def __init__(self, book: Book, say: Callable[[str], None], player: ThreadPoolExecutor | None) -> None:
        self._book, self._say, self._player = book, say, player
        self._settings = book.settings
        self._signals = Signals()
        self._trials: dict[int, Trial] = {}
        self._running: dict[int, Trial] = {}
        self._waiting = [trial.number for trial in book.trials if not trial.ended]
        self._unreported: ConfigError | None = None
        self._prefect = PrefectView(book.sweep, say, start=book.example.tracking.enabled)

    def run(self) -> SweepState:
        """Drive the sweep to its end."""
        if self._all_done() and self._book.state.status in ("finished", "failed"):
            self._say(f"sweep {self._book.sweep.run_id} is finished")
            return self._book.state
        self._book.event("head_started", pid=os.getpid(), host=platform.node(), token=driver_token(self._book.sweep))
        if self._player is None:
            self._prefect.begin()
        self._adopt()
        try:
            with self._signals.kept():
                self._loop()
        except SystemExit:  # SIGTERM: trials have driver processes of their own
            name = self._book.sweep.run_id
            self._say(f"the sweep's driver ends, its trials continue; `hlatctl resume {name}` continues the sweep")
            raise
        return self._finish()

    def _loop(self) -> None:
        while True:
            try:
                self._signals.check()
                self._book.refresh()
                for trial in list(self._running.values()):
                    if not (trial.is_played and trial.alive):  # the thread that simulates one looks itself
                        self._look(trial)
                if self._ending:
                    self._pause_all()
                else:
                    self._fill()
                if not self._running and (self._ending or self._all_done()):
                    return
                time.sleep(_SIMULATED_POLL_S if self._player else _POLL_S)
            except KeyboardInterrupt:
                self._signals.take()
                if self._book.state.stop_requested:
                    raise
                self._book.event("stop_requested", by="interrupt")

    @property
    def _ending(self) -> bool:
        return self._book.state.stop_requested or self._unreported is not None

    def _all_done(self) -> bool:
        return all(trial.ended for trial in self._book.trials) and self._book.next_arm() is None

    def _finish(self) -> SweepState:
        book, state, name = self._book, self._book.state, f"sweep {self._book.sweep.run_id}"
        error: HlatctlError | None = self._unreported
        if error is None and state.stop_requested and not self._all_done():
            error = StoppedError(
                f"{name}: stopped, {book.summary()}", hint=f"`hlatctl resume {book.sweep.run_id}` continues the sweep"
            )
        if error is None and state.count("failed") == len(state.trials):
            first = state.trials[0]
            error = TrainingError(
                f"{name}: every trial failed; {first.run_id}: {first.why}", hint=f"hlatctl status {first.run_id}"
            )
        outcome = "finished" if error is None else "stopped" if isinstance(error, StoppedError) else "failed"
        book.event("sweep_finished", outcome=outcome, message=error.message if error else book.summary())
        self._prefect.end(outcome)
        if self._player is None and book.trials:
            conclude_sweep(book.sweep, book.example, self._say)
            self._report()
        if error is not None:
            raise error
        return state

    def _report(self) -> None:
        """Write the report; an error here doesn't change the sweep's outcome."""
        try:
            self._say(f"report: {report.build(self._book.sweep)}")
        except HlatctlError as error:
            self._say(f"no report: {error.message}; `hlatctl sweep-report {self._book.sweep.run_id}` tries again")

    def _adopt(self) -> None:
        """Watch running trials again. A trial without a driver waits for its turn."""
        for number in list(self._waiting):
            trial = self._trial(number)
            if trial is not None and trial.alive:
                self._waiting.remove(number)
                self._running[number] = trial
                self._say(f"{trial.run.run_id}: still running, re-attached")
                if self._book.state.trials[number].status == "stopping":
                    trial.request_stop(self._book.sweep.run_id)

    def _fill(self) -> None:
        """Start trials in order while there are slots."""
        while len(self._running) < self._settings.parallel:
            if not self._waiting:
                asked = self._book.ask()
                if asked is None:
                    return
                self._waiting.append(asked)
            trial = self._trial(self._waiting.pop(0))
            if trial is not None:
                self._begin(trial)

    def _trial(self, number: int) -> Trial | None:
        """Return a trial by its number; None if it can't be run, which is journalled as a failure."""
        if number in self._trials:
            return self._trials[number]
        book, asked = self._book, self._book.state.trials[number]
        try:
            config = book.variations.compose(asked.point)
            check(book.objective, config)
            if self._player is None:  # a drawn arm is not known earlier
                refuse_simulation(config, hint="remove the values that set cluster.launcher=mock")
        except HlatctlError as error:
            self._end(asked, "failed", error.message)
            return None
        config = config if asked.seed is None else dataclasses.replace(config, seed=asked.seed)
        of = pretrain.TrialOf(sweep=book.sweep.run_id, trial=number)
        self._trials[number] = Trial(book.sweep.trial(number), config, of, sys.argv, self._player)
        return self._trials[number]

    def _begin(self, trial: Trial) -> None:
        """Start a trial, unless it has already ended."""
        asked = self._book.state.trials[trial.of.trial]
        self._running[asked.number] = trial
        resumed = asked.status == "paused" and trial.state.status == "stopped"
        if trial.state.status in ("finished", "failed", "stopped") and not resumed:
            return
        self._book.event("trial_started", durable=False, trial=asked.number, run_id=trial.run.run_id)
        self._say(f"{trial.run.run_id}: started, {_text(asked)}")
        try:
            trial.start(partial(self._look_in, trial), self._prefect.trial_environment(asked.number, asked.run_id))
        except LaunchError as error:
            if not trial.alive:  # otherwise another process drives it
                del self._running[asked.number]
                trial.end_job()
                self._end(asked, "failed", error.message)
            return
        if asked.status == "stopping":  # its driver ignores requests from before its start
            trial.request_stop(self._book.sweep.run_id)

    def _look_in(self, trial: Trial) -> None:
        """Compare a trial; called by the thread that simulates it."""
        with self._book.lock:
            self._compare(trial)

    def _look(self, trial: Trial) -> None:
        with self._book.lock:
            alive = trial.alive  # checked first, so that everything it wrote before its end is read
            self._compare(trial)
            if not alive:
                trial.raise_unexpected()
                self._conclude(trial)

    def _compare(self, trial: Trial) -> None:
        """Journal new values of the objective, and stop the trial if it falls behind or diverges."""
        book, state, asked = self._book, trial.refresh(), self._book.state.trials[trial.of.trial]
        rungs = book.objective.rungs(trial.config, self._settings.rungs)
        for tokens, value in book.objective.values(state, rungs).items():
            if tokens in asked.rungs:
                continue
            if book.rung(asked.number, tokens, value) and tokens < rungs[-1]:
                self._stop_early(trial, asked, "pruned", f"{self._settings.pruner} at {tokens:,} tokens: {value:.4f}")
        diverges = signs.divergence(state) if self._settings.stop_diverged else ""
        if diverges:
            self._stop_early(trial, asked, "diverged", diverges)

    def _stop_early(self, trial: Trial, asked: TrialState, outcome: str, why: str) -> None:
        if asked.status != "running" or trial.state.status != "running":
            return
        self._book.event("trial_stopping", trial=asked.number, outcome=outcome, why=why)
        trial.request_stop(self._book.sweep.run_id)
        self._say(f"{trial.run.run_id}: stopping, {why}")

    def _pause_all(self) -> None:
        for number, trial in self._running.items():
            if self._book.state.trials[number].status in ("asked", "running") and trial.alive:
                self._book.event("trial_paused", trial=number)
                trial.request_stop(self._book.sweep.run_id)

    def _conclude(self, trial: Trial) -> None:
        """Journal the outcome of a trial whose driver has ended."""
        asked, state = self._book.state.trials[trial.of.trial], trial.state
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
            self._conclude_lost(trial, asked)

    def _conclude_finished(self, trial: Trial, asked: TrialState) -> None:
        aim = self._book.objective
        value = asked.rungs.get(aim.rungs(trial.config, self._settings.rungs)[-1])
        if value is not None and math.isfinite(value):
            self._end(asked, "finished", "", trial, value)
            return
        if asked.stops_as:  # the stop came when only evaluations were left
            self._end(asked, asked.stops_as, asked.why, trial)
            return
        why = f"sweep.objective={aim.name}: {trial.run.run_id} has finished without reporting it"
        self._end(asked, "failed", f"{why} as a number", trial)
        if value is None and not any(other.value is not None for other in self._book.trials):
            reported = sorted({name for m in trial.state.milestones.values() for name in m.scores})
            self._unreported = ConfigError(why, hint=f"it reports {', '.join(reported) or 'loss alone'}")

    def _conclude_lost(self, trial: Trial, asked: TrialState) -> None:
        """Restart a trial whose driver died without a reason in its journal; fail it after several times."""
        self._book.event("trial_head_lost", trial=asked.number)
        if asked.lost_drivers >= _MAX_LOST_DRIVERS:
            trial.end_job()
            self._end(asked, "failed", f"its driver died {asked.lost_drivers} times, see its logs/head.log", trial)
        else:
            self._waiting.insert(0, asked.number)

    def _end(
        self, asked: TrialState, outcome: str, why: str, trial: Trial | None = None, value: float | None = None
    ) -> None:
        took: dict[str, float] = {}
        if trial is not None:
            early = outcome in ("pruned", "diverged")
            took = {
                "tokens": trial.state.tokens,
                "process_hours": trial.process_hours,
                "saved_process_hours": trial.left_process_hours if early else 0.0,
            }
            if early and not self._settings.keep_pruned_checkpoints:
                trial.drop_checkpoints()
        self._book.end(asked.number, outcome, why, value=value, **took)
        self._trials.pop(asked.number, None)
        self._prefect.trial_ended(asked.number, outcome)
        result = why if value is None else f"{self._book.objective.name} {value:.4f}"
        ended = f"{self._book.state.count(*ENDED)} of {self._book.space.trials}"
        self._say(f"{asked.run_id}: {outcome}, {result} ({ended})")


def _text(asked: TrialState) -> str:
    seed = [] if asked.seed is None else [f"seed={asked.seed}"]
    return " ".join([*(f"{key}={value}" for key, value in asked.point.items()), *seed])
