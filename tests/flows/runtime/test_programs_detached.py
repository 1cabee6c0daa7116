"""A driver that doesn't start in time is ended, and gives its own error to the process that started it."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from flows.runtime import programs
from hlatctl.run.errors import LaunchError, RunBusyError
from hlatctl.run.lease import hold_driver
from tests.hlatctl.conftest import MakeRun, make_run  # noqa: F401

pytestmark = pytest.mark.processes


def test_of_two_drivers_the_slower_one_names_the_other(make_run: MakeRun) -> None:
    run = make_run(until="killed")
    with hold_driver(run), pytest.raises(RunBusyError, match=f"process {os.getpid()} is already driving it") as raised:
        programs.start_driver(run)
    assert "hlatctl status" in raised.value.hint


@pytest.mark.parametrize(("when", "error"), [("late", LaunchError), ("interrupted", KeyboardInterrupt)])
def test_no_driver_is_left_that_could_start_later(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, when: str, error: type[BaseException]
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def alongside(words: list[str], output: Any, env: dict[str, str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return started[0]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(programs, "start_alongside", alongside)
    if when == "late":
        monkeypatch.setattr(programs, "_START_TIMEOUT_S", 0.0)
    else:
        monkeypatch.setattr("flows.runtime.programs.time.sleep", interrupt)
    with pytest.raises(error):
        programs.start_driver(make_run(until="killed"))
    assert started[0].poll() is not None
