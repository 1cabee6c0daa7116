"""The local launcher beyond what every launcher does: identities of processes, priorities, and its script."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conf.schema import Config
from flows.launch import local
from flows.launch.base import Job
from flows.launch.local import LocalLauncher
from flows.simulation.cluster import SimulatedLauncher
from hlatctl.run import files, processes
from hlatctl.run.errors import ConfigError
from tests.flows.launch.contract import python_job
from tests.waiting import wait_for

pytestmark = pytest.mark.processes


def test_cancelling_ends_child_processes_that_ignore_sigterm(tmp_path: Path) -> None:
    code = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
    launcher, job = LocalLauncher(), python_job(tmp_path, code)
    handle = launcher.submit(launcher.render(job))
    wait_for(lambda: job.log.read_text().strip().isdigit())
    launcher.cancel(handle, grace_s=0.3)
    assert launcher.status(handle).ended
    child = Path(f"/proc/{job.log.read_text().strip()}/stat")
    wait_for(lambda: not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_killed_script_is_lost_and_its_child_processes_can_be_ended(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    # The command itself dies with the script on Linux, a process that it started does not.
    code = "import subprocess; subprocess.run(['sleep', '600'])"
    handle = launcher.submit(launcher.render(python_job(tmp_path, code)))
    token = files.read_json(tmp_path / "launch" / "try.pid")["token"]
    program = launcher.process(handle)
    assert program

    def sleeps() -> bool:
        return any(processes.command_line(process.pid)[:1] == ("sleep",) for process in processes.of_job(token))

    wait_for(sleeps)
    processes.send(program, signal.SIGKILL)
    wait_for(lambda: launcher.status(handle).state == "lost")
    assert sleeps()
    launcher.cancel(handle, grace_s=1)
    assert not processes.of_job(token)


def _sleeper() -> subprocess.Popen[bytes]:
    """Start a process of no job that leads a process group."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_gets_no_open_file_of_the_process_that_starts_it(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    with socket.create_server(("127.0.0.1", 0)) as ours:
        ours.set_inheritable(True)  # as libraries in C++ leave theirs
        handle = launcher.submit(launcher.render(python_job(tmp_path, "import time; time.sleep(600)")))
        opened = os.readlink(f"/proc/self/fd/{ours.fileno()}")
    program = launcher.process(handle)
    assert program
    theirs = set()
    for descriptor in Path(f"/proc/{program.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed
            theirs.add(os.readlink(descriptor))
    launcher.cancel(handle, grace_s=0)
    assert os.fspath(python_job(tmp_path, "").log) in theirs
    assert opened not in theirs


def test_a_process_with_the_id_of_a_lost_job_is_not_signalled(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    handle = launcher.handle(launcher.render(python_job(tmp_path, "")))
    with _sleeper() as innocent:
        old = {"pid": innocent.pid, "started": "1", "boot_id": "before the reboot", "token": "of a lost job"}
        files.write_text(tmp_path / "launch" / "try.pid", json.dumps(old))
        assert launcher.status(handle).state == "lost"
        launcher.cancel(handle, grace_s=0.1)
        launcher.cancel(handle, grace_s=0)
        assert launcher.dump_stacks(handle) == "no running process can print its stack"
        assert innocent.poll() is None
        innocent.kill()


DAMAGED_RECORDS = ["1", "0", "-1", "true", "[]", '{"pid": 1}', "{", '{"pid": 1, "started": "1"}', '{"pid": 1e999}']


@pytest.mark.parametrize("text", DAMAGED_RECORDS)
def test_a_damaged_start_record_signals_nothing(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def harm(*_: object) -> None:
        raise AssertionError("a signal was sent")

    for module, name in ((os, "kill"), (os, "killpg"), (signal, "pidfd_send_signal")):
        monkeypatch.setattr(module, name, harm, raising=False)
    launcher = LocalLauncher()
    handle = launcher.handle(launcher.render(python_job(tmp_path, "")))
    files.write_text(tmp_path / "launch" / "try.pid", text)
    launcher.cancel(handle, grace_s=0.1)
    assert launcher.status(handle).state == "lost"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "text", ["text", '{"pid": 1e999}', '{"pid": 1, "started": "1", "boot_id": "x", "token": ""}', ""]
)
def test_a_running_job_is_found_and_stopped_without_its_start_record(tmp_path: Path, text: str) -> None:
    launcher = LocalLauncher()
    handle = launcher.submit(launcher.render(python_job(tmp_path, "import time; time.sleep(600)")))
    record = tmp_path / "launch" / "try.pid"
    wait_for(lambda: len(local.recorded_start(handle).members()) > 1)  # type: ignore[union-attr]
    members = local.recorded_start(handle).members()  # type: ignore[union-attr]
    files.write_text(record, text)
    assert launcher.status(handle).state == "running"
    launcher.cancel(handle, grace_s=0)
    assert launcher.status(handle).state == "failed"
    assert not [process for process in members if processes.alive(process)]


def test_stopping_another_users_job_is_an_error_without_traceback(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with _sleeper() as foreign:
        identity = processes.identify(foreign.pid)
        assert identity
        record = {"pid": identity.pid, "started": identity.started, "boot_id": identity.boot_id, "token": "t"}
        code = f"""
import os
from flows.launch.local import Record
from hlatctl.run.errors import LaunchError
from hlatctl.run.processes import Identity
os.setuid(65534)
value = {record!r}
try:
    Record(token=value.pop("token"), process=Identity(**value)).ask_to_stop()
except LaunchError as error:
    print(error.message)
"""
        command = [sys.executable, "-c", code]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said == f"process {foreign.pid}: belongs to another user, so SIGTERM can't be sent to it\n"
        assert foreign.poll() is None
        foreign.kill()


def test_a_job_beside_training_has_a_low_priority_as_a_process_and_as_a_session(tmp_path: Path) -> None:
    job = dataclasses.replace(
        python_job(
            tmp_path,
            "import os, pathlib; group = pathlib.Path('/proc/self/autogroup');"
            "print(os.nice(0), group.read_text().split()[-1] if group.exists() else 5)",
        ),
        beside_training=True,
    )
    launcher = LocalLauncher()
    handle = launcher.submit(launcher.render(job))
    wait_for(lambda: launcher.status(handle).ended)
    assert job.log.read_text() == f"{os.nice(0) + 5} 5\n"


def test_an_invalid_name_of_a_variable_is_refused(tmp_path: Path) -> None:
    job = python_job(tmp_path, "")
    job = Job(**{**vars(job), "env": {"A;B": "1"}})
    with pytest.raises(ConfigError, match=r"'A;B': is not a name of an environment variable"):
        LocalLauncher().render(job)


def test_the_training_script_equals_the_golden_file(simulated_config: Config) -> None:
    from flows.stages.attempt import training_job
    from hlatctl.run.paths import RunPaths

    job = training_job(simulated_config, RunPaths(Path("/runs/golden")), 2)
    script = LocalLauncher().render(job).script.replace(sys.executable, "PYTHON")
    cache = job.env["TORCHINDUCTOR_CACHE_DIR"]
    golden = Path(__file__).parents[2] / "golden" / "train.sh"
    assert script.replace(cache, "CACHE_DIR") == golden.read_text()


def test_processes_that_catch_the_signal_print_their_stacks_and_none_is_ended(tmp_path: Path) -> None:
    code = """
import faulthandler, signal, subprocess, sys, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
deaf = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
def wait_here():
    print(deaf.pid, flush=True)
    time.sleep(600)
wait_here()
"""
    launcher, job = LocalLauncher(), python_job(tmp_path, code)
    handle = launcher.submit(launcher.render(job))
    wait_for(lambda: job.log.read_text().strip().isdigit())
    deaf = int(job.log.read_text())
    assert launcher.dump_stacks(handle) == "1 of 1 processes were asked to print their stacks to their logs"
    wait_for(lambda: "in wait_here" in job.log.read_text())
    assert launcher.status(handle).state == "running"
    os.kill(deaf, 0)
    os.kill(deaf, signal.SIGKILL)
    launcher.cancel(handle, grace_s=1)
    assert launcher.dump_stacks(handle) == "no running process can print its stack"


def test_the_count_of_out_of_memory_kills_is_a_number_or_unknown() -> None:
    counted = LocalLauncher().oom_kills()
    assert counted is None or counted >= 0
    assert SimulatedLauncher(Config()).oom_kills() is None
