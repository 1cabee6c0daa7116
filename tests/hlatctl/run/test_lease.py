"""Who drives a run: seen from another process, gone with its holder however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hlatctl.run.errors import RunBusyError
from hlatctl.run.lease import head_pid, hold_head
from hlatctl.run.paths import RunPaths

HOLDER = """
import sys
from pathlib import Path
from hlatctl.run.lease import hold_head
from hlatctl.run.paths import RunPaths
with hold_head(RunPaths(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(run: RunPaths) -> Iterator[subprocess.Popen[str]]:
    """Another process that drives the run."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    (tmp_path / "r").mkdir()
    return RunPaths(tmp_path / "r")


def test_nobody_drives_a_run_that_nobody_drives(run: RunPaths) -> None:
    assert head_pid(run) is None
    with hold_head(run):
        pass
    assert head_pid(run) is None


def test_the_driver_is_known_and_a_second_one_is_refused(run: RunPaths) -> None:
    with holder(run) as process:
        assert head_pid(run) == process.pid
        with pytest.raises(RunBusyError, match=f"process {process.pid} drives it already"), hold_head(run):
            pass


def test_a_driver_that_is_killed_never_looks_alive(run: RunPaths) -> None:
    with holder(run) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert head_pid(run) is None
        with hold_head(run):
            pass
