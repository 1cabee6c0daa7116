"""One trial of a sweep: a run with a driver process of its own, or, in a dry run, simulated in this process.

The trial's driver is ``hlatctl resume`` and outlives the sweep's. The next driver of the sweep finds it by the trial's
driver lock.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from conf.schema import Config
from flows import control, pretrain
from flows.runtime import detached
from flows.runtime.context import FlowContext
from hlatctl.run import stopping
from hlatctl.run.errors import HlatctlError, LaunchError, RunBusyError
from hlatctl.run.fold import apply, follow
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter
from hlatctl.run.lease import driver_pid
from hlatctl.run.manifest import folder_steps
from hlatctl.run.pace import training_left_s
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState

#: How long another command may hold the journal of requests.
_OPERATOR_S = 10.0
_POLL_S = 0.1
#: Stages that a simulated trial skips: the sweep has validated it, and 200 reports take minutes.
_NOT_SIMULATED = ("validate", "report")


class Trial:
    """A trial's run directory and its driver.

    Args:
        run: its directory, which may not exist yet.
        config: of the run.
        of: its place in the sweep.
        argv: the sweep's command line, for provenance.
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

    def refresh(self) -> RunState:
        """Apply what is new in its journal to its state, and return the state."""
        for event in self._tail.stream():
            apply(self.state, event)
        return self.state

    def start(self, on_update: Callable[[], None], env: dict[str, str]) -> None:
        """Start or resume it; creates its directory if there is none.

        Args:
            on_update: called by the thread that simulates it, whenever its journal may have grown.
            env: variables for its process.

        Raises:
            LaunchError: its process has ended at once.
            StorageError: the directory can't be created.
        """
        if self._player is not None:
            self._played = self._player.submit(self._play, on_update)
        else:
            self._make()
            try:
                self._process = detached.start_driver(self.run, env=env)
            except HlatctlError as error:
                raise LaunchError(error.message, hint=error.hint) from None

    def raise_unexpected(self) -> None:
        """Raise the error of a simulated trial if it isn't a HlatctlError, which the journal contains."""
        error = self._played.exception() if self._played is not None else None
        if error is not None and not isinstance(error, HlatctlError):
            raise error

    def request_stop(self, by: str) -> None:
        """Ask it to write a checkpoint and stop."""
        with self._operator() as journal:
            stopping.request(self.run, journal, by=by)

    def end_job(self) -> None:
        """End the training that a lost driver has left: the next trial takes its place on the machine."""
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
        ends_s = [(a.ended_unix_s or self.state.last_event_unix_s) - a.started_unix_s for a in self.state.attempts]
        return self.config.world_size * sum(ends_s) / 3600

    @property
    def left_process_hours(self) -> float:
        """Hours that the rest of its training would take, summed over its processes; 0 if its pace is unknown."""
        return self.config.world_size * (training_left_s(self.state, self.config.total_steps) or 0.0) / 3600

    def _operator(self) -> JournalWriter:
        """Open the journal of requests, which another command may hold for a moment."""
        deadline = time.monotonic() + _OPERATOR_S
        while True:
            try:
                return JournalWriter(self.run, OPERATOR_WRITER)
            except RunBusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)

    def _make(self) -> None:
        if self.state.run_id:
            return
        # A driver that died here may have left an incomplete directory. Only this trial has the number.
        shutil.rmtree(self.run.root, ignore_errors=True)
        pretrain.create(self.config, argv=self._argv, run_id=self.run.run_id, of=self.of)

    def _play(self, on_update: Callable[[], None]) -> None:
        self._make()
        pretrain.drive(self.run, _Watcher(on_update), caller_of=_player)


def _player(ctx: FlowContext) -> _Player:
    assert ctx.world is not None
    ctx.world.notifies_steps = True  # the pruner needs them
    return _Player(ctx.clock)


class _Player(pretrain.PlainCaller):
    """Calls the stages of a simulated trial."""

    def call(self, name: str, stage: Callable[[], Any]) -> Any:
        """Call the stage, unless only a real trial needs it."""
        return None if name in _NOT_SIMULATED else super().call(name, stage)


@dataclasses.dataclass
class _Watcher:
    """Calls a function whenever the trial's journal may have grown."""

    on_update: Callable[[], None]

    def update(self, state: RunState, config: Config) -> None:
        """Call the function."""
        self.on_update()

    def message(self, text: str) -> None:
        """Ignore it: a sweep doesn't show messages of its trials."""
