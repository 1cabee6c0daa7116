"""Starting programs: their priority during training, how Ctrl-C reaches them, and drivers that don't start."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flows.launch.local import BESIDE_TRAINING_NICE
from flows.runtime import programs
from hlatctl.run.errors import LaunchError, RunBusyError
from hlatctl.run.lease import hold_driver
from tests.hlatctl.conftest import MakeRun, make_run  # noqa: F401

pytestmark = pytest.mark.processes

_MODULE = """
import os, sys, time
folder = sys.argv[1]
with open(folder + "/began", "w") as file:
    file.write(f"{os.nice(0)} {os.getsid(0) == os.getpid()}")
try:
    while True:
        time.sleep(0.05)
except KeyboardInterrupt:
    with open(folder + "/saved", "w") as file:
        file.write("saved")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that works until it is interrupted, and then saves."""
    (tmp_path / "endless_work.py").write_text(_MODULE)
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    return "endless_work"


def test_ctrl_c_reaches_a_process_of_low_priority_which_saves_first(module: str, tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "began").exists() or not (tmp_path / "began").read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        programs.ask(module, os.fspath(tmp_path), yields=True)
    thread.join()
    assert (tmp_path / "began").read_text() == f"{min(19, os.nice(0) + BESIDE_TRAINING_NICE)} True"
    assert (tmp_path / "saved").read_text() == "saved"


def test_a_process_that_is_too_slow_is_ended(module: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no answer after 0\.5 s"):
        programs.ask(module, os.fspath(tmp_path), timeout_s=0.5)
    assert not (tmp_path / "saved").exists()


def test_a_process_that_yields_has_a_low_priority_and_its_own_arguments() -> None:
    script = 'nice; echo "$1|$2"'
    words = programs.yielding_command(["sh", "-c", script, "sh", "a b", "$HOME"])
    printed = subprocess.run(words, capture_output=True, text=True, check=True, start_new_session=True).stdout
    assert printed.splitlines() == [str(min(19, os.nice(0) + BESIDE_TRAINING_NICE)), "a b|$HOME"]


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

    def alongside(words: list[str], output: Any, **_: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return started[0]

    def interrupt(seconds: float) -> None:
        monkeypatch.undo()  # ending the driver waits, too
        raise KeyboardInterrupt

    monkeypatch.setattr(programs, "start_alongside", alongside)
    if when == "late":
        monkeypatch.setattr(programs, "_START_TIMEOUT_S", 0.0)
    else:
        monkeypatch.setattr("flows.runtime.programs.time.sleep", interrupt)
    with pytest.raises(error):
        programs.start_driver(make_run(until="killed"))
    assert started[0].poll() is not None
