"""A run's driver that a test starts, kills and resumes; the run's events and processes; and its losses undisturbed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from conf.load import dump
from conf.of_run import of_run
from hlatctl.run import files
from hlatctl.run.journal import Event, read_events
from hlatctl.run.paths import RunPaths
from tests.e2e.conftest import Cli
from tests.waiting import wait_for


class Driver:
    """A driver of a run, which the test may end; and the run."""

    def __init__(self, cli: Cli, run_id: str) -> None:
        self.cli, self.run = cli, RunPaths(cli.runs_dir / run_id)
        self.process: subprocess.Popen[str] | None = None

    def train(self, *overrides: str) -> None:
        self.process = self.cli.start_train(self.run.run_id, *overrides)

    def resume(self) -> None:
        self.process = self.cli.start("resume", self.run.run_id)

    def kill(self) -> None:
        if not self._over() and self.process:
            self.process.kill()
            self.process.communicate()

    def end(self) -> str:
        """Wait for the driver's end; return what it printed."""
        assert self.process
        return self.process.communicate()[0]

    def events(self, kind: str) -> list[Event]:
        return [event for event in read_events(self.run) if event["kind"] == kind]

    def steps(self, attempt: int) -> None:
        """Wait until an attempt has written a checkpoint."""
        self.until(lambda: any(event["attempt"] == attempt for event in self.events("checkpoint_committed")))

    def ended(self, attempt: int) -> Event:
        self.until(lambda: len(self.events("attempt_ended")) >= attempt)
        return self.events("attempt_ended")[attempt - 1]

    def until(self, true: object) -> None:
        """Wait until a condition holds, as long as the driver runs."""
        wait_for(lambda: true() or self._over())  # type: ignore[operator]
        assert true(), self.end()  # type: ignore[operator]

    def _over(self) -> bool:
        return self.process is None or self.process.poll() is not None


class Held:
    """A running training of two processes, the second of which the test stops, so that no step ends."""

    def __init__(self, cli: Cli, run_id: str) -> None:
        wait_for(lambda: len(cli.trainer_pids(run_id)) == 2)
        self._pid = cli.trainer_pids(run_id)[1]
        self.hold()

    def hold(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def release(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


def undisturbed_losses(
    run: RunPaths, folder: Path, train: Callable[[RunPaths, int], int], *, steps: int
) -> dict[int, float]:
    """Train the same steps again, in this process from the first to the last, with an optimizer that doesn't pause."""
    config = of_run(run)
    config = replace(
        config,
        runs_dir=os.fspath(folder),
        train=replace(config.train, max_steps=steps),
        cluster=replace(config.cluster, processes_per_node=1),
        parallel=type(config.parallel)(),
        optimizer=replace(config.optimizer, name="adamw"),
        checkpoint=replace(config.checkpoint, every_steps=steps),
    )
    again = RunPaths(folder / "undisturbed")
    files.write_text(again.config, files.seal_lines(dump(config)))
    files.write_text(again.dataset, run.dataset.read_text(encoding="utf-8"))
    assert train(again, 1) == 0
    return {event["step"]: event["loss"] for event in read_events(again) if event["kind"] == "step"}
