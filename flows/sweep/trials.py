"""One trial of a sweep as its head sees it: a run in a process of its own, or played by this one in a dry run.

The process is a head as ``hlatctl resume`` starts it, and outlives the sweep's: whoever drives the sweep next finds it
by its head lock.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from conf.fingerprint import data_fingerprint
from conf.schema import Config
from flows import pretrain
from flows.runtime import detached
from flows.runtime.context import FlowContext
from flows.stages.compile import graph_key
from hlatctl.run.errors import HlatctlError, RunBusyError
from hlatctl.run.fold import apply
from hlatctl.run.journal import OPERATOR_WRITER, JournalTail, JournalWriter
from hlatctl.run.lease import driver_pid
from hlatctl.run.manifest import folder_steps
from hlatctl.run.pace import training_left_s
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState

#: How long a person's command may hold the journal of requests.
_OPERATOR_S = 10.0
_POLL_S = 0.1
#: Stages that a played trial leaves out: the sweep has validated it, and 200 pages of figures take minutes.
_NOT_PLAYED = ("validate", "report")


class Trial:
    """A trial's run directory and whoever drives it.

    Args:
        run: its directory, which may not exist yet.
        config: of the run.
        of: its place in the sweep.
        argv: the sweep's command line, for provenance.
        player: plays the run in this process, for a dry run; None: it is driven by a process of its own.
    """

    def __init__(
        self, run: RunPaths, config: Config, of: pretrain.TrialOf, argv: list[str], player: Executor | None
    ) -> None:
        self.run, self.config, self.of = run, config, of
        self.state = RunState()
        self._argv, self._player = argv, player
        self._tail = JournalTail(run)
        self._process: subprocess.Popen[bytes] | None = None
        self._played: Future[Any] | None = None
        self.refresh()

    @property
    def is_played(self) -> bool:
        """By this process."""
        return self._player is not None

    @property
    def alive(self) -> bool:
        """Somebody drives it."""
        if self._played is not None:
            return not self._played.done()
        if self._process is not None and self._process.poll() is None:
            return True
        return driver_pid(self.run) is not None

    def refresh(self) -> RunState:
        """Fold what is new in its journal."""
        for event in self._tail.read_new():
            apply(self.state, event)
        return self.state

    def start(self, on_update: Callable[[], None], env: dict[str, str]) -> None:
        """Drive it from wherever it stands, making its directory if there is none.

        Args:
            on_update: called by the thread that plays it, whenever there may be news.
            env: variables for its process.

        Raises:
            LaunchError: its process has ended at once.
            StorageError: the directory can't be made.
        """
        if self._player is not None:
            self._played = self._player.submit(self._play, on_update)
        else:
            self._make()
            self._process = detached.start_driver(self.run, env=env)

    def end_of_play(self) -> None:
        """Raise what has ended a played trial, if that is no error that its journal tells of."""
        error = self._played.exception() if self._played is not None else None
        if error is not None and not isinstance(error, HlatctlError):
            raise error

    def request_stop(self, by: str) -> None:
        """Ask it to write a checkpoint and end."""
        with self._operator() as journal:
            journal.append("stop_requested", durable=True, by=by)

    def drop_checkpoints(self) -> None:
        """Delete its checkpoints, and tell its journal."""
        with self._operator() as journal:
            for step in folder_steps(self.run):
                shutil.rmtree(self.run.checkpoint(step), ignore_errors=True)
                journal.append("checkpoint_deleted", step=step)

    def prepares_alike(self, other: Trial) -> bool:
        """The other one prepares, now, what this one needs too: the same corpus, or the same graphs."""
        if other.needs("data") and data_fingerprint(self.config) == data_fingerprint(other.config):
            return True
        return (
            self.config.backend.compile and other.needs("compile") and graph_key(self.config) == graph_key(other.config)
        )

    def needs(self, stage: str) -> bool:
        """It has not come through a stage."""
        found = self.state.stages.get(stage)
        return found is None or found.status == "running"

    @property
    def process_hours(self) -> float:
        """Hours that its training has taken by now, over all its processes."""
        ends_s = [(a.ended_unix_s or self.state.last_event_unix_s) - a.started_unix_s for a in self.state.attempts]
        return self.config.world_size * sum(ends_s) / 3600

    @property
    def left_process_hours(self) -> float:
        """Hours that the rest of its training would take; 0 if its pace is not known."""
        return self.config.world_size * (training_left_s(self.state, self.config.total_steps) or 0.0) / 3600

    def _operator(self) -> JournalWriter:
        """The journal of requests, which a person's command may hold for a moment."""
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
        # Nothing tells of what a head that died here had begun to make; the number is this trial's alone.
        shutil.rmtree(self.run.root, ignore_errors=True)
        pretrain.create(self.config, argv=self._argv, run_id=self.run.run_id, of=self.of)

    def _play(self, on_update: Callable[[], None]) -> None:
        self._make()
        pretrain.drive(self.run, _Watcher(on_update), caller_of=_player)


def _player(ctx: FlowContext) -> _Player:
    assert ctx.world is not None
    ctx.world.notifies_steps = True  # whoever prunes must see them
    return _Player(ctx.clock)


class _Player(pretrain.PlainCaller):
    """Calls the stages of a played trial."""

    def call(self, name: str, stage: Callable[[], Any]) -> Any:
        """Call the stage, unless it is one of those that only a real trial needs."""
        return None if name in _NOT_PLAYED else super().call(name, stage)


@dataclasses.dataclass
class _Watcher:
    """Tells the sweep's head, in the thread that plays the trial, that there may be news."""

    on_update: Callable[[], None]

    def update(self, state: RunState, config: Config) -> None:
        """There may be."""
        self.on_update()

    def message(self, text: str) -> None:
        """Of no interest to whoever watches a sweep."""
