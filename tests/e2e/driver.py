"""A run's driver that a test starts, kills and resumes, and the run's events."""

from __future__ import annotations

import subprocess

from hlatctl.run.journal import Event, read_events
from hlatctl.run.paths import RunPaths
from tests.e2e.conftest import Cli
from tests.waiting import wait_for


class Driver:
    """A driver of a run, which the test may end; and the run."""

    def __init__(self, cli: Cli, run_id: str) -> None:
        self._cli, self.run = cli, RunPaths(cli.runs_dir / run_id)
        self.process: subprocess.Popen[str] | None = None

    def train(self, *overrides: str) -> None:
        self.process = self._cli.start_train(self.run.run_id, *overrides)

    def resume(self) -> None:
        self.process = self._cli.start("resume", self.run.run_id)

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
