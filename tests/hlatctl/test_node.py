"""The program that runs a job's command on a node: its records, its signals, and what it leaves: nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.launch.endings import node_records
from hlatctl.run import fence, processes
from hlatctl.run.paths import RunPaths
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.processes

_TORCHRUN = "torch.distributed.run"
#: A substitute for torchrun: two ranks in sessions of their own, which stop slowly. It records its own SIGTERM.
_LAUNCHER = """
import os, signal, subprocess, sys
from pathlib import Path
folder = Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (folder / "torchrun-got-sigterm").touch())
ranks = [
    subprocess.Popen([sys.executable, "-c", sys.argv[2], folder], env={**os.environ, "RANK": str(rank)},
                     start_new_session=True)
    for rank in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""
_RANK = """
import os, signal, sys, time
from pathlib import Path
asked = []
def ask(*_):
    asked.append(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGTERM, ask)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # as trainer.process does
own = Path(sys.argv[1], "rank-" + os.environ["RANK"])
own.with_suffix(".ready").touch()
while not asked:
    time.sleep(0.01)
own.with_suffix(".saving").touch()
while not own.with_name("let-them-finish").exists():
    time.sleep(0.01)
own.with_suffix(".saved").touch()
sys.exit(75)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a node's program with a command of Python; none is left."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *argv: str, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "hlatctl.node", os.fspath(tmp_path / "job"), "--"]
        node = subprocess.Popen(
            [*command, sys.executable, "-c", code, *argv],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": os.fspath(tmp_path), **env},
        )
        started.append(node)
        return node

    yield run
    for node in started:
        if node.poll() is None:
            node.send_signal(signal.SIGQUIT)
        node.communicate()


def said(node: subprocess.Popen[str]) -> str:
    assert node.stdout
    return node.stdout.readline()


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


@pytest.mark.parametrize("to_all", [False, True])
def test_a_request_to_stop_reaches_the_ranks_and_never_torchrun(tmp_path: Path, start: Start, to_all: bool) -> None:
    """Schedulers signal all processes of a job."""
    node = start(_LAUNCHER, os.fspath(tmp_path), _RANK, _TORCHRUN)
    wait_for(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    for process in processes.of_job(_read(tmp_path / "job.pid")["token"]) if to_all else ():
        processes.send(process, signal.SIGTERM)
    node.send_signal(signal.SIGTERM)
    wait_for(lambda: len(list(tmp_path.glob("*.saving"))) == 2)
    (tmp_path / "let-them-finish").touch()
    assert node.wait(WAIT_S) == 75
    assert len(list(tmp_path.glob("*.saved"))) == 2
    assert not (tmp_path / "torchrun-got-sigterm").exists()
    record = _read(tmp_path / "job.exit_code")
    assert (record["code"], record["asked_to_stop"]) == (75, True)
    assert record["oom_kills"] is None or record["oom_kills"] >= 0


def test_torchrun_without_ranks_is_ended_because_there_is_nothing_to_save(tmp_path: Path, start: Start) -> None:
    node = start("import time; print(flush=True); time.sleep(600)", _TORCHRUN)
    said(node)
    node.send_signal(signal.SIGTERM)
    assert node.wait(WAIT_S) == 128 + signal.SIGKILL
    assert _read(tmp_path / "job.exit_code")["asked_to_stop"]


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel ends a process with its parent")
def test_a_command_ends_with_its_program(tmp_path: Path, start: Start) -> None:
    node = start("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    command = processes.identify(int(said(node)))
    assert command
    node.kill()
    try:
        wait_for(lambda: not processes.alive(command))
    finally:
        processes.send(command, signal.SIGKILL)


def test_a_job_ends_when_the_schedulers_program_on_its_node_is_gone(tmp_path: Path) -> None:
    node = [sys.executable, "-m", "hlatctl.node", os.fspath(tmp_path / "job"), "--", sys.executable, "-c"]
    step = f"import subprocess; subprocess.run({[*node, 'import time; time.sleep(600)']!r})"
    scheduler = subprocess.Popen([sys.executable, "-c", step], env={**os.environ, "HLATCTL_NODES": "1"})
    wait_for((tmp_path / "job.pid").exists)
    scheduler.kill()
    scheduler.wait()
    token = _read(tmp_path / "job.pid")["token"]
    try:
        wait_for((tmp_path / "job.exit_code").exists)
    finally:
        left = processes.of_job(token)
        for process in left:
            processes.send(process, signal.SIGKILL)
    assert not left
    assert _read(tmp_path / "job.exit_code")["code"] == 128 + signal.SIGKILL


def test_the_processes_of_an_attempt_that_is_over_are_ended(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    base = run.launch(2) / "train"
    base.parent.mkdir(parents=True)
    words = [sys.executable, "-m", "hlatctl.node", os.fspath(base), "--"]
    command = "import time; print('started', flush=True); time.sleep(600)"
    node = subprocess.Popen([*words, sys.executable, "-c", command], stdout=-1, stderr=-1, text=True)
    said(node)
    fence.close(run, 1)
    fence.close(run, 2)
    _, errors = node.communicate(timeout=WAIT_S)
    assert "attempt 2 is over, ending its processes" in errors
    assert node.returncode == 128 + signal.SIGKILL


def test_a_single_process_is_asked_itself_and_its_signal_is_the_exit_code(tmp_path: Path, start: Start) -> None:
    node = start("import time; print(flush=True); time.sleep(600)")
    said(node)
    node.send_signal(signal.SIGTERM)
    assert node.wait(WAIT_S) == 128 + signal.SIGTERM
    assert _read(tmp_path / "job.exit_code")["code"] == 128 + signal.SIGTERM


def test_a_node_that_is_killed_while_it_stops_has_noted_that_it_was_asked(tmp_path: Path, start: Start) -> None:
    node = start("import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)")
    said(node)
    assert node_records(tmp_path / "job")[0].asked_to_stop is False
    node.send_signal(signal.SIGTERM)
    wait_for(lambda: node_records(tmp_path / "job")[0].asked_to_stop)
    node.kill()
    node.wait(WAIT_S)
    (record,) = node_records(tmp_path / "job")
    assert (record.code, record.asked_to_stop) == (None, True)


def test_the_first_record_identifies_the_process_and_the_last_is_written_when_all_have_ended(
    tmp_path: Path, start: Start
) -> None:
    child = "import time; time.sleep(600)"
    node = start(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)")
    wait_for((tmp_path / "job.pid").exists)
    record = _read(tmp_path / "job.pid")
    assert record["pid"] == node.pid
    assert record["boot_id"]
    assert record["started"]
    wait_for((tmp_path / "job.exit_code").exists)
    assert not processes.of_job(record["token"])
    assert node.wait(WAIT_S) == 0


def test_temporary_files_go_to_a_private_folder_that_is_removed(tmp_path: Path, start: Start) -> None:
    code = "import os, tempfile; print(tempfile.mkdtemp(), oct(os.stat(tempfile.gettempdir()).st_mode & 0o777))"
    node = start(code)
    output, _ = node.communicate(timeout=WAIT_S)
    made, mode = output.split()
    assert mode == "0o700"
    assert Path(made).parent == Path(_read(tmp_path / "job.pid")["tmp_dir"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.exit_code", "job.pid"]


def test_sigquit_ends_everything_at_once(tmp_path: Path, start: Start) -> None:
    node = start(_LAUNCHER, os.fspath(tmp_path), _RANK, _TORCHRUN)
    wait_for(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    node.send_signal(signal.SIGQUIT)
    assert node.wait(WAIT_S) == 128 + signal.SIGKILL
    assert not processes.of_job(_read(tmp_path / "job.pid")["token"])
    assert not list(tmp_path.glob("*.saving"))


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    node = [sys.executable, "-m", "hlatctl.node", os.fspath(tmp_path / "job"), "--", "no-such-program", "a b"]
    result = subprocess.run(node, capture_output=True, text=True, check=False)
    assert result.returncode == 127
    assert result.stderr == "no-such-program 'a b': can't be started (No such file or directory)\n"


def test_a_folder_that_is_not_there_is_named_with_the_host_in_one_line(tmp_path: Path) -> None:
    base = tmp_path / "launch" / "job"
    node = [sys.executable, "-m", "hlatctl.node", os.fspath(base), "--", "true"]
    env = {**os.environ, "HLATCTL_NODE_NAME": "n4"}
    result = subprocess.run(node, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 127
    assert result.stderr == (
        f"StorageError: {base}.pid.tmp: can't be written on n4 (No such file or directory); runs_dir must be on "
        "storage that all nodes share\n"
    )


def test_each_node_of_several_has_records_of_its_own(tmp_path: Path, start: Start) -> None:
    assert start("", NODE_RANK="3").wait(WAIT_S) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.node-3.exit_code", "job.node-3.pid"]


def test_the_record_of_the_end_has_its_room_before_the_job_begins(tmp_path: Path, start: Start) -> None:
    go = tmp_path / "go"
    node = start(f"import os, time\nwhile not os.path.exists({os.fspath(go)!r}): time.sleep(0.02)")
    wait_for((tmp_path / "job.pid").exists)
    room = (tmp_path / "job.exit_code.tmp").stat()
    go.touch()
    assert node.wait(WAIT_S) == 0
    written = (tmp_path / "job.exit_code").stat()
    assert room.st_size > 0
    assert (written.st_ino, written.st_size) == (room.st_ino, room.st_size), "written where a full disk has room"


def test_ranks_print_into_the_log_of_their_node_with_their_numbers(tmp_path: Path, start: Start) -> None:
    log = tmp_path / "train.log"
    rank = "from hlatctl.run import rank_output; rank_output.send_to_node_log(); raise ValueError('the reason')"
    assert start(_LAUNCHER, os.fspath(tmp_path), rank, _TORCHRUN, NODE_RANK="3", HLATCTL_LOG=os.fspath(log)).wait(
        WAIT_S
    )
    lines = (tmp_path / "train.node-3.log").read_text().splitlines()
    for number in (0, 1):
        own = [line for line in lines if line.startswith(f"[rank{number}]: ")]
        assert own[0].endswith("Traceback (most recent call last):")
        assert own[-1].endswith("ValueError: the reason")
    assert not log.exists(), "the first node's log"
