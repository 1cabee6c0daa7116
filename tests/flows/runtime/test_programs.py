"""Starting processes: their priority during training, and how Ctrl-C reaches them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from flows.launch.local import BESIDE_TRAINING_NICE
from flows.runtime import programs
from hlatctl.run.errors import LaunchError

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


@pytest.mark.processes
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


@pytest.mark.processes
def test_a_process_that_is_too_slow_is_ended(module: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no answer after 0\.5 s"):
        programs.ask(module, os.fspath(tmp_path), timeout_s=0.5)
    assert not (tmp_path / "saved").exists()


@pytest.mark.processes
def test_a_process_that_yields_has_a_low_priority_and_its_own_arguments() -> None:
    script = 'nice; echo "$1|$2"'
    words = programs.yielding_command(["sh", "-c", script, "sh", "a b", "$HOME"])
    printed = subprocess.run(words, capture_output=True, text=True, check=True, start_new_session=True).stdout
    assert printed.splitlines() == [str(min(19, os.nice(0) + BESIDE_TRAINING_NICE)), "a b|$HOME"]
