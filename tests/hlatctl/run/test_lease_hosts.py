"""Who drives a run on a file system that several hosts share; each host is a UTS namespace of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from hlatctl.run.errors import RunBusyError
from hlatctl.run.lease import Holder, driver, driver_pid, hold, hold_driver
from hlatctl.run.paths import RunPaths
from tests.hlatctl.run.test_lease import HOLDER
from tests.waiting import WAIT_S

ELSEWHERE = "login2"
LONG_AGO = (0.0, 0.0)

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare: a host name of its own"
)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    (tmp_path / "r").mkdir()
    return RunPaths(tmp_path / "r")


@contextmanager
def holder_elsewhere(run: RunPaths) -> Iterator[subprocess.Popen[str]]:
    """A process of another host that drives the run."""
    on_host = f'hostname {ELSEWHERE} && exec "$@"'
    with subprocess.Popen(
        ["unshare", "--uts", "sh", "-c", on_host, "sh", sys.executable, "-c", HOLDER, str(run.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.processes
def test_a_driver_on_another_host_is_named_and_a_second_one_is_refused(run: RunPaths) -> None:
    with holder_elsewhere(run) as process:
        holder_seen = driver(run)
        assert holder_seen is not None
        assert (holder_seen.pid, holder_seen.host, holder_seen.is_elsewhere) == (process.pid, ELSEWHERE, True)
        busy = pytest.raises(RunBusyError, match=f"process {process.pid} on {ELSEWHERE} is already")
        with busy as refused, hold_driver(run):
            pass
        assert f"if {ELSEWHERE} is dead, try again 60 s" in refused.value.hint
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
    assert driver(run) is None, "a driver that ends frees its run at once, for every host"
    with hold_driver(run):
        assert driver_pid(run) == os.getpid()


def test_a_driver_that_ends_with_an_error_frees_its_run_for_every_host(run: RunPaths) -> None:
    with pytest.raises(ValueError, match="failed"), hold_driver(run):
        raise ValueError("failed")
    assert run.driver_lock.read_text() == ""


@pytest.mark.processes
def test_a_driver_whose_heartbeat_is_old_is_taken_over_and_ends_itself_if_it_wakes(run: RunPaths) -> None:
    with holder_elsewhere(run) as process:
        process.send_signal(signal.SIGSTOP)  # it keeps its lock, as a file server keeps that of a dead host
        os.utime(run.driver_lock, LONG_AGO)
        assert driver(run) is None
        with hold_driver(run):
            assert driver_pid(run) == os.getpid()
            process.send_signal(signal.SIGCONT)
            assert process.wait(WAIT_S) == -signal.SIGTERM
            assert driver_pid(run) == os.getpid()


def test_a_heartbeat_counts_where_locks_of_other_hosts_are_not_seen(run: RunPaths) -> None:
    other = Holder(pid=7, host=ELSEWHERE, since_unix_s=time.time(), token="t")
    run.driver_lock.write_text(json.dumps(asdict(other)), encoding="utf-8")
    with pytest.raises(RunBusyError, match=f"process 7 on {ELSEWHERE}"), hold_driver(run):
        pass
    os.utime(run.driver_lock, LONG_AGO)
    with hold_driver(run):
        assert driver(run) != other


def test_a_lease_is_waited_for_until_its_heartbeat_is_old(run: RunPaths) -> None:
    waited: list[str] = []

    def wait(holder_seen: Holder) -> None:
        waited.append(holder_seen.host)
        os.utime(lease, LONG_AGO)

    lease = run.root / "lease"
    lease.write_text(json.dumps({"pid": 7, "host": ELSEWHERE, "since_unix_s": 0, "token": "t"}), encoding="utf-8")
    with hold(lease, wait):
        assert waited == [ELSEWHERE]
