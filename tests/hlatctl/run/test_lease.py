"""Who drives a run: seen from another process, gone with its holder however that one ends."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from hlatctl.run.errors import RunBusyError
from hlatctl.run.journal import FLOW_WRITER, JournalWriter
from hlatctl.run.lease import Holder, check_driver, driver_pid, hold, hold_driver, successor
from hlatctl.run.lease import holder as holder_of
from hlatctl.run.paths import RunPaths

HOLDER = """
import sys
from pathlib import Path
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
with hold_driver(RunPaths(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(run: RunPaths) -> Iterator[subprocess.Popen[str]]:
    """Another process that drives the run."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
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


def test_a_run_without_a_driver_has_no_driver_pid(run: RunPaths) -> None:
    assert driver_pid(run) is None
    with hold_driver(run):
        pass
    assert driver_pid(run) is None


@pytest.mark.processes
def test_the_driver_is_known_and_a_second_one_is_refused(run: RunPaths) -> None:
    with holder(run) as process:
        assert driver_pid(run) == process.pid
        with pytest.raises(RunBusyError, match=f"process {process.pid} is already driving it"), hold_driver(run):
            pass


@pytest.mark.processes
def test_a_driver_that_is_killed_never_looks_alive(run: RunPaths) -> None:
    with holder(run) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert driver_pid(run) is None
        with hold_driver(run):
            pass


def test_whoever_finds_a_lease_taken_learns_who_has_it_and_gets_it_when_that_one_is_done(tmp_path: Path) -> None:
    path = tmp_path / "made on demand" / "lease"
    holders: list[Holder] = []
    first = hold(path, holders.append)

    def wait(holder: Holder) -> None:
        holders.append(holder)
        first.__exit__(None, None, None)

    assert holder_of(path) is None
    first.__enter__()
    assert holder_of(path) == holder_of(path)
    with hold(path, wait):
        (holder,) = holders
        assert (holder.pid, holder.host) == (os.getpid(), platform.node())
        assert str(holder) == f"process {os.getpid()} on {platform.node()}"
        assert 0 <= time.time() - holder.since_unix_s < 60
        assert holder_of(path) is not None
    assert holder_of(path) is None


def test_a_lease_whose_file_says_nothing_counts_all_the_same(tmp_path: Path) -> None:
    path, holders = tmp_path / "lease", []

    def give_up(holder: Holder) -> None:
        holders.append(holder)
        raise RunBusyError("taken")

    with hold(path, give_up):
        path.write_text("nonsense", encoding="utf-8")
        with pytest.raises(RunBusyError, match="taken"), hold(path, give_up):
            pass
    assert [str(holder) for holder in holders] == ["process ? on an unknown host"]


def taken_over(run: RunPaths) -> None:
    """Replace the lock file, as a process of a host does that sees no lock of this one and no heartbeat."""
    new = run.driver_lock.with_name("new")
    holder = {"pid": 7, "host": "login2", "since_unix_s": time.time(), "token": "theirs"}
    new.write_text(json.dumps(holder), encoding="utf-8")
    new.replace(run.driver_lock)


def test_a_driver_that_another_one_has_replaced_writes_nothing_more(run: RunPaths) -> None:
    check_driver(run)  # a process that drives nothing
    with hold_driver(run):
        check_driver(run)
        assert successor(run) is None
        journal = JournalWriter(run, FLOW_WRITER, check=partial(check_driver, run))
        journal.append("head_started", pid=1)
        before = journal.path.read_bytes()
        taken_over(run)
        for write in (partial(journal.append, "head_started", pid=2), journal.flush):
            with pytest.raises(RunBusyError, match=r"run r: process 7 on login2 drives it now; this driver had lost"):
                write()
        journal.close()
        assert journal.path.read_bytes() == before
        assert str(successor(run)) == "process 7 on login2"
    assert "theirs" in run.driver_lock.read_text(), "the other driver keeps its lease"
    check_driver(run)
