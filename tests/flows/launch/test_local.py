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
from flows.launch.base import Handle, Job
from flows.launch.local import LocalLauncher
from flows.simulation.cluster import SimulatedLauncher
from hlatctl.run import files, processes
from hlatctl.run.errors import ConfigError
from hlatctl.run.following import Stays
from hlatctl.run.processes import Identity
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


#: A rank that leaves what it is, and then kills itself, or the process that forked it.
_RANK = """
import json, os, signal, sys
from pathlib import Path
from trainer.process import follow_launcher
follow_launcher()
folder, number = Path(sys.argv[1]), sys.argv[2]
own = {name: os.environ.get(name) for name in ("RANK", "LOGS", "TORCHELASTIC_RESTART_COUNT", "HLATCTL_FORKS")}
temporary = Path(os.environ["TMPDIR"])
own |= {"parent": os.getppid(), "left": [path.name for path in temporary.glob("rank-*")]}
own["sockets"] = [str(path) for path in Path("/proc/self/fd").iterdir() if path.is_socket()]
print("attempt", number, flush=True)
Path(folder, f"{number}-{own['RANK']}.tmp").write_text(json.dumps(own))
Path(folder, f"{number}-{own['RANK']}.tmp").rename(folder / f"{number}-{own['RANK']}.json")
while len(list(folder.glob(f"{number}-*.json"))) < 2:
    pass
(temporary / f"rank-{own['RANK']}").touch()
if "passes" in sys.argv:
    sys.exit()
os.kill(own["parent"] if "kills-parent" in sys.argv else os.getpid(), signal.SIGKILL)
signal.pause()
"""


def test_the_next_attempt_is_forked_from_what_a_failed_one_left_or_else_starts_anew(tmp_path: Path) -> None:
    modules, told = tmp_path / "modules", tmp_path / "told"
    told.mkdir()
    files.write_text(modules / "torch.py", "")  # importing PyTorch takes a second
    files.write_text(modules / "dies.py", _RANK)
    root = Path(__file__).parents[3]

    def attempt(
        launcher: LocalLauncher, number: int, *words: str, code: int = 1, stays: Stays = "failed", **env: str
    ) -> tuple[Handle, Identity, int]:
        logs = tmp_path / f"logs-{number}"
        job = Job(
            name="preflight" if stays == "passed" else "train",
            run_dir=tmp_path,
            argv=("-m", "dies", os.fspath(told), str(number), *words),
            launch_dir=tmp_path / "launch" / f"attempt-{number:04d}",
            log_dir=logs,
            env={"PYTHONPATH": f"{modules}:{root}", "LOGS": os.fspath(logs), **env},
            processes_per_node=2,
            shared_modules=("json",),
            stays=stays,
        )
        handle = launcher.submit(launcher.render(job))
        record = local.recorded(handle)
        assert record
        wait_for(lambda: launcher.has_ended(handle))
        assert launcher.status(handle).exit_code == code
        launcher.cancel(handle, grace_s=0)
        ranks = [files.read_json(told / f"{number}-{rank}.json") for rank in range(2)]
        for rank, own in enumerate(ranks):
            assert (own["RANK"], own["LOGS"], own["left"]) == (str(rank), os.fspath(logs), [])
            assert (own["HLATCTL_FORKS"], own["sockets"]) == (None, [])
            assert f"[rank{rank}]: attempt {number}\n" in job.log.read_text()
        assert job.log.read_text().count(" attempt ") == 2
        assert not processes.ranks(record.process.pid)
        return handle, record.process, ranks[0]["parent"]

    launcher = LocalLauncher()
    _, program, parent = attempt(launcher, 1)
    assert processes.alive(program)
    _, again, same = attempt(launcher, 2)
    assert (again, same) == (program, parent)
    os.kill(parent, signal.SIGKILL)
    _, after_damage, other = attempt(launcher, 3)
    assert after_damage != program
    assert other != parent
    _, changed, _ = attempt(launcher, 4, OMP_NUM_THREADS="3")
    assert changed != after_damage, "it was imported with other variables"
    assert not processes.alive(after_damage)
    newest, last, _ = attempt(launcher, 5, OMP_NUM_THREADS="3")
    assert last == changed
    LocalLauncher().cancel(newest, grace_s=0)
    assert not processes.alive(last), "another driver leaves nothing"
    _, unused, _ = attempt(launcher, 6, OMP_NUM_THREADS="3")
    launcher.release(tmp_path)
    assert not processes.alive(unused)
    _, first, _ = attempt(launcher, 7)
    _, second, _ = attempt(launcher, 8, "kills-parent", code=128 + signal.SIGKILL)
    assert second == first
    _, third, _ = attempt(launcher, 9)
    _, preflight, _ = attempt(launcher, 10, "passes", code=0, stays="passed")
    _, after_preflight, _ = attempt(launcher, 11)
    assert third == preflight == after_preflight
    attempt(launcher, 12, stays="passed")
    wait_for(lambda: not processes.alive(third))  # a preflight that fails leaves nothing
    _, alone, _ = attempt(launcher, 13, stays="")
    wait_for(lambda: not processes.alive(alone))


def test_only_a_system_whose_processes_fork_keeps_what_a_failed_attempt_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = dataclasses.replace(python_job(tmp_path, ""), processes_per_node=2, shared_modules=("json",), stays="failed")
    assert "--stay" in LocalLauncher().render(job).script
    monkeypatch.setattr("sys.platform", "darwin")
    assert "--stay" not in LocalLauncher().render(job).script


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
