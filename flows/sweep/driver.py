"""The driver of a sweep: starts trials, compares them, and ends those that fall behind.

Every action is journalled before it is done, so another driver can replace one that dies at any point. A trial gets its
run directory once, a running trial is watched again, and an ended one is never touched. Each trial is a run whose own
driver, ``hlatctl resume``, outlives the sweep's and is found by its lock; in a dry run it is simulated in this process.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from conf import simulation
from conf.schema import Config
from flows import control, pretrain
from flows.runtime import programs
from flows.runtime.context import FlowContext
from flows.runtime.driver import Signals
from flows.stages.validate import refuse_simulation
from flows.sweep import report, study
from flows.sweep.book import Book
from flows.sweep.forecast import forecast
from flows.sweep.study import check
from flows.tracking.follower import conclude_sweep
from flows.tracking.prefect_sweep import PrefectView
from hlatctl.driver_job import CHAIN_ENV
from hlatctl.plan.pace import training_left_s
from hlatctl.run import files, stopping
from hlatctl.run.checkpoint import folder_steps
from hlatctl.run.errors import ConfigError, HlatctlError, LaunchError, RunBusyError, StoppedError, TrainingError
from hlatctl.run.fold import apply, follow
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter
from hlatctl.run.lease import driver_pid, driver_token, hold_driver
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.state import RunState
from hlatctl.run.sweep import ENDED, SweepState, TrialState
from hlatctl.units import bounded

#: How long another command may hold the journal of requests.
_OPERATOR_S = 10.0
_TRIALS_POLL_S = 0.1
#: Stages that a simulated trial skips: the sweep has validated it, and 200 reports take minutes.
_NOT_SIMULATED = ("validate", "report")


class Trial:
    """A trial's run directory and its driver.

    Args:
        run: the trial's directory, which may not exist yet.
        of: its place in the sweep.
        argv: the command line that creates the same run, recorded as provenance.
        player: runs the simulation in a dry run; None: the trial gets a driver process.
    """

    def __init__(
        self, run: RunPaths, config: Config, of: pretrain.TrialOf, argv: list[str], player: Executor | None
    ) -> None:
        self.run, self.config, self.of = run, config, of
        self.state, self._tail = follow(run)
        self._argv, self._player = argv, player
        self._process: subprocess.Popen[bytes] | None = None
        self._played: Future[Any] | None = None
        self.refresh()

    @property
    def is_played(self) -> bool:
        """Whether it is simulated in this process."""
        return self._player is not None

    @property
    def alive(self) -> bool:
        """Whether it has a driver."""
        if self._played is not None:
            return not self._played.done()
        if self._process is not None and self._process.poll() is None:
            return True
        return driver_pid(self.run) is not None

    @property
    def was_started_here(self) -> bool:
        """Whether this process has started its driver, rather than an earlier driver of the sweep."""
        return self._process is not None or self._played is not None

    def leave(self) -> None:
        """End its driver, if this process has started it and it still drives; training continues."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def refresh(self) -> RunState:
        """Apply what is new in its journal to its state, and return the state."""
        for event in self._tail.stream():
            apply(self.state, event)
        return self.state

    def start(self, on_update: Callable[[], None], env: dict[str, str]) -> None:
        """Start or resume it; create its directory if there is none.

        Args:
            on_update: called by the thread that simulates it, whenever its journal may have grown.
            env: environment variables for its process.

        Raises:
            LaunchError: its process ended immediately.
            StorageError: the directory can't be created.
        """
        if self._player is not None:
            self._played = self._player.submit(self._play, on_update)
        else:
            self._make()
            try:
                self._process = programs.start_driver(self.run, env=env)
            except HlatctlError as error:
                raise LaunchError(error.message, hint=error.hint) from None

    def raise_unexpected(self) -> None:
        """Raise the error of a simulated trial if it isn't a HlatctlError: those are in the journal."""
        error = self._played.exception() if self._played is not None else None
        if error is not None and not isinstance(error, HlatctlError):
            raise error

    def request_stop(self, by: str) -> None:
        """Ask it to write a checkpoint and stop."""
        with self._operator() as journal:
            stopping.request(self.run, journal, by=by)

    def end_job(self) -> None:
        """End the training that a lost driver has left, because the next trial takes its place on the machine."""
        if self._player is None and self.run.config.is_file():
            control.request_stop(self.run, by=self.of.sweep, wait_s=0.0)

    def drop_checkpoints(self) -> None:
        """Delete its checkpoints and journal that."""
        with self._operator() as journal:
            for step in folder_steps(self.run):
                shutil.rmtree(self.run.checkpoint(step), ignore_errors=True)
                journal.append("checkpoint_deleted", step=step)

    @property
    def process_hours(self) -> float:
        """Hours of training so far, summed over its processes."""
        ends_s = [(a.ended_unix_s or self.state.worked_unix_s) - a.started_unix_s for a in self.state.attempts]
        return self.config.world_size * sum(ends_s) / 3600

    @property
    def left_process_hours(self) -> float:
        """Hours that the rest of its training takes, summed over its processes; 0 if its pace is unknown."""
        return self.config.world_size * (training_left_s(self.state, self.config) or 0.0) / 3600

    def _operator(self) -> JournalWriter:
        """Open the journal of requests, which another command may hold for a moment."""
        deadline = time.monotonic() + _OPERATOR_S
        while True:
            try:
                return JournalWriter(self.run, OPERATOR_WRITER)
            except RunBusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_TRIALS_POLL_S)

    def _make(self) -> None:
        if self.state.run_id:
            return
        # A driver that died here may have left an incomplete directory. Only this trial has the number.
        shutil.rmtree(self.run.root, ignore_errors=True)
        sweep = SweepPaths(self.run.root.parent / self.of.sweep)
        simulated = simulation.of_run(sweep) if self.is_played else None
        pretrain.create(self.config, argv=self._argv, run_id=self.run.run_id, of=self.of, simulated=simulated)

    def _play(self, on_update: Callable[[], None]) -> None:
        self._make()
        pretrain.drive(self.run, _Watcher(on_update), caller_of=_player)


def _player(ctx: FlowContext) -> _Player:
    assert ctx.simulation is not None
    ctx.simulation.notifies_steps = True  # the pruner needs them
    return _Player(ctx.clock)


class _Player(pretrain.PlainCaller):
    def call(self, name: str, stage: Callable[[], Any]) -> Any:
        """Call the stage, unless only a real trial needs it."""
        return None if name in _NOT_SIMULATED else super().call(name, stage)


@dataclasses.dataclass
class _Watcher:
    on_update: Callable[[], None]

    def update(self, state: RunState, config: Config) -> None:
        self.on_update()

    def message(self, text: str) -> None:
        """Do nothing: a sweep doesn't show messages of its trials."""


#: A trial fails if its driver dies this often without a reason in its journal.
_MAX_LOST_DRIVERS = 3
#: Threads for simulated trials; they can't use more than one core.
_MOST_SIMULATED = 2
_POLL_S = 0.5
_SIMULATED_POLL_S = 0.02


def drive(sweep: SweepPaths, say: Callable[[str], None]) -> SweepState:
    """Drive a sweep to its end; start or resume it.

    Args:
        say: called with each message for the user.

    Raises:
        RunBusyError: the sweep already has a driver.
        StoppedError: the sweep was stopped on request and can be resumed.
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
    def __init__(self, book: Book, say: Callable[[str], None], player: ThreadPoolExecutor | None) -> None:
        self._book, self._say, self._player = book, say, player
        self._settings = book.settings
        self._signals = Signals()
        self._trials: dict[int, Trial] = {}
        self._running: dict[int, Trial] = {}
        self._waiting = [trial.number for trial in book.trials if not trial.ended]
        self._unreported: HlatctlError | None = None  # why no further trial is started
        self._prefect = PrefectView(book.sweep, say, start=book.example.tracking.enabled)

    def run(self) -> SweepState:
        if self._all_done() and self._book.state.status in ("finished", "failed"):
            self._say(f"{self._book.state.noun} {self._book.sweep.run_id} is finished")
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
            if CHAIN_ENV in os.environ:  # a job, whose end kills the trials' drivers; the next job starts them again
                for trial in self._running.values():
                    trial.leave()
            raise
        return self._finish()

    def _loop(self) -> None:
        while True:
            try:
                self._signals.check()
                self._book.refresh()
                for trial in list(self._running.values()):
                    if not (trial.is_played and trial.alive):  # the thread that simulates a trial compares it itself
                        self._look(trial)
                if not self._ending and self._book.rungs_ended and self._book.state.forecast is None:
                    self._forecast()
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
        book, state = self._book, self._book.state
        name = f"{state.noun} {book.sweep.run_id}"
        error: HlatctlError | None = self._unreported
        if error is None and state.stop_requested and not self._all_done():
            error = StoppedError(
                f"{name}: stopped, {book.summary()}",
                hint=f"`hlatctl resume {book.sweep.run_id}` continues the {state.noun}",
            )
        if error is None and state.count("failed") == len(state.trials):
            first = state.trials[0]
            error = TrainingError(
                f"{name}: every trial failed; {first.run_id}: {first.why}", hint=f"hlatctl status {first.run_id}"
            )
        outcome = "finished" if error is None else "stopped" if isinstance(error, StoppedError) else "failed"
        message = error.message if error and outcome == "failed" else book.summary()
        book.event("sweep_finished", outcome=outcome, message=message)
        self._prefect.end(outcome, book.example.tracking.final_sync_timeout_s)
        if self._player is None and book.trials:
            conclude_sweep(book.sweep, book.example, self._say)
            self._report()
        if error is not None:
            raise error
        return state

    def _forecast(self) -> None:
        """Forecast a ladder's target, or end the ladder without training it."""
        try:
            self._book.event("forecast_made", **forecast(self._book))
        except HlatctlError as error:
            self._unreported = error
            return
        made = self._book.state.forecast
        assert made is not None
        self._say(f"forecast of the target's {made.objective}: {bounded(made.loss)}")

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
                refuse_simulation(config, hint="remove the values that set cluster.launcher=simulated")
        except HlatctlError as error:
            self._end(asked, "failed", error.message)
            return None
        config = config if asked.seed is None else dataclasses.replace(config, seed=asked.seed)
        made = book.state.forecast if asked.arm == book.space.target else None
        of = pretrain.TrialOf(sweep=book.sweep.run_id, trial=number, forecast=made.fields if made else None)
        argv = [sys.argv[0], "train", *asked.overrides]
        self._trials[number] = Trial(book.sweep.trial(number), config, of, argv, self._player)
        return self._trials[number]

    def _begin(self, trial: Trial) -> None:
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
        diverges = study.divergence(state) if self._settings.stop_diverged else ""
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
        asked, state = self._book.state.trials[trial.of.trial], trial.state
        del self._running[asked.number]
        if state.status == "finished":
            self._conclude_finished(trial, asked)
        elif state.status == "failed":
            diverged = study.divergence(state) if self._settings.stop_diverged else ""
            self._end(asked, "diverged" if diverged else "failed", diverged or state.message, trial)
        elif asked.status == "paused":
            return
        elif state.status == "stopped":
            by_hand = state.message if state.stop_by == stopping.BUDGET else "stopped by hand"
            self._end(asked, asked.stops_as or "pruned", asked.why or by_hand, trial)
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
        """Restart a trial whose driver died without a reason in its journal; after several deaths the trial fails.

        A driver of an earlier process of the sweep is not counted: it may have died with that process's node.
        """
        if not trial.was_started_here:
            self._waiting.insert(0, asked.number)
            return
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
