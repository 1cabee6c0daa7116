"""A process is signalled only if it is the one that was meant."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hlatctl.run import processes
from hlatctl.run.errors import LaunchError

pytestmark = pytest.mark.processes

_SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def _start(**options: object) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(_SLEEP, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
    process.stdout.readline()
    return process  # type: ignore[no-any-return]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps until it is killed."""
    with _start() as process:
        yield process
        process.kill()


def _identity(process: subprocess.Popen[bytes]) -> processes.Identity:
    identity = processes.identify(process.pid)
    assert identity
    return identity


def test_root_signals_no_process_of_another_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start another user's process")
    with subprocess.Popen(["sleep", "600"], user=65534) as other:
        identity = processes.identify(other.pid)
        assert identity
        with pytest.raises(LaunchError, match="belongs to another user"):
            processes.send(identity, signal.SIGTERM)
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("change", [{"started": "1"}, {"boot_id": "another boot"}])
def test_a_process_that_got_the_id_of_another_is_not_signalled(
    sleeper: subprocess.Popen[bytes], change: dict[str, str]
) -> None:
    recorded = processes.Identity(**{**dataclasses.asdict(_identity(sleeper)), **change})
    assert not processes.alive(recorded)
    assert not processes.send(recorded, signal.SIGKILL)
    assert processes.alive(_identity(sleeper))
    assert processes.send(_identity(sleeper), signal.SIGKILL)
    assert sleeper.wait() == -signal.SIGKILL


def test_an_ended_process_and_a_zombie_are_gone(sleeper: subprocess.Popen[bytes]) -> None:
    recorded = _identity(sleeper)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.alive(recorded)
    assert not processes.send(recorded, signal.SIGTERM)
    sleeper.wait()
    assert not processes.send(recorded, signal.SIGTERM)


@pytest.mark.parametrize("pid", [1, 0, -1])
def test_no_record_makes_a_signal_reach_more_than_one_process(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "identify", lambda pid: processes.Identity(pid=pid, started="", boot_id=""))
    assert not processes.send(processes.Identity(pid=pid, started="", boot_id=""), signal.SIGKILL)


@_LINUX
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_an_error_that_names_it(sleeper: subprocess.Popen[bytes]) -> None:
    code = (
        "import os, signal, sys; os.setuid(65534); from hlatctl.run import processes\n"
        "try: processes.send(processes.identify(int(sys.argv[1])), signal.SIGTERM)\n"
        "except processes.LaunchError as error: print(error)"
    )
    command = [sys.executable, "-c", f"import hlatctl.run.processes; {code}", str(sleeper.pid)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        f"process {sleeper.pid}: belongs to another user, so SIGTERM can't be sent to it",
        f"hint: as that user or as root: kill -TERM {sleeper.pid}",
    ]
    assert processes.alive(_identity(sleeper))
    assert issubclass(LaunchError, Exception)


@_LINUX
def test_the_processes_of_a_job_are_found_by_its_token_in_any_session() -> None:
    env = {**os.environ, processes.JOB_ENV: "token-of-this-test"}
    with _start(env=env, start_new_session=True) as one, _start(env={**env, processes.JOB_ENV: "another"}) as other:
        assert processes.of_job("token-of-this-test") == [_identity(one)]
        one.kill()
        other.kill()
    assert not processes.of_job("token-of-this-test")


#: Starts a process that ends with it, and dies before that process has said so.
_DIES_FIRST = """
import os, subprocess, sys
from hlatctl.run import processes
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=processes.child_environment())
"""
_COMES_LATE = """
import os, time
from hlatctl.run import processes
while os.getppid() == int(os.environ[processes.PARENT_ENV]):
    time.sleep(0.01)
print("its parent is dead", flush=True)
processes.end_with_parent()
print("it runs", flush=True)
"""


@_LINUX
def test_a_process_whose_parent_died_before_it_could_end_with_it_ends() -> None:
    command = [sys.executable, "-c", _DIES_FIRST, _COMES_LATE]
    said = subprocess.run(
        command, env=processes.child_environment(), stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert said.splitlines() == ["its parent is dead"]


@_LINUX
def test_a_process_that_ends_with_its_parent_lives_as_long_as_that() -> None:
    code = "from hlatctl.run import processes; processes.end_with_parent(); print('it runs')"
    said = subprocess.check_output([sys.executable, "-c", code], env=processes.child_environment(), text=True)
    assert said == "it runs\n"


def test_a_smaller_control_group_limits_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_CGROUP", tmp_path)
    host_bytes = processes.free_host_bytes()
    assert host_bytes > 1 << 20
    (tmp_path / "memory.current").write_text("3000\n")
    for limit, free_bytes in (("5000\n", 2000), ("1000\n", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert processes.free_host_bytes() == free_bytes
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 700\n")
    assert processes.free_host_bytes() == 2700, "files that were read are dropped first"
    (tmp_path / "memory.max").write_text("max\n")
    assert processes.free_host_bytes() > 1 << 20


def test_the_kernel_is_asked_to_kill_this_process_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_ADJUSTMENT", tmp_path / "oom_score_adj")
    processes.die_first()
    assert (tmp_path / "oom_score_adj").read_text() == "1000"
    monkeypatch.setattr(processes, "_ADJUSTMENT", tmp_path / "missing" / "oom_score_adj")
    processes.die_first()
