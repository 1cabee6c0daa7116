"""The servers of `hlatctl ui` start together, end together, and report a taken port. They are real."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from flows.tracking import local_server, ui, ui_record
from flows.tracking.ui import serve
from hlatctl.run.errors import LaunchError, PortInUseError, RunBusyError
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.processes

SERVE = """
import sys
from pathlib import Path
from flows.tracking.ui import serve
from hlatctl.run.errors import run_main

def main():
    show = lambda urls, auth: print(sorted(urls.items()), auth, sep="\\n", flush=True)
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), show, lambda text: None)
    return 0

sys.exit(run_main(main))
"""


def never(_addresses: dict[str, str], _auth: str) -> None:
    raise AssertionError("nothing is ready")


def ignore(_text: str) -> None:
    """Ignore the message."""


@pytest.fixture
def ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


@pytest.fixture
def start(tmp_path: Path, ports: tuple[int, int]) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run_it() -> subprocess.Popen[str]:
        # Must work with any umask, and with a proxy, which can't reach our loopback.
        argv = [
            "env",
            "http_proxy=http://127.0.0.1:9",
            sys.executable,
            "-c",
            f"import os; os.umask(0)\n{SERVE}",
            str(tmp_path / "runs"),
            *map(str, ports),
        ]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run_it
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=WAIT_S)


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def groups_alive(leaders: list[int]) -> list[int]:
    """Return the process groups that still have a member; zombies of init don't count."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) in leaders and state != "Z":
            alive.append(int(group))
    return alive


def fetch(url: str, auth: str = "") -> str:
    return local_server.get(url, auth, timeout_s=WAIT_S).decode()


def answer(url: str, auth: str = "", method: str = "GET", **headers: str) -> int:
    """Return the status of an answer."""
    if auth:
        headers["Authorization"] = local_server.basic(auth)
    data = b"{}" if method == "POST" else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


@pytest.mark.parametrize(("which", "option"), [(0, "--prefect-port"), (1, "--mlflow-port")])
def test_a_taken_port_is_named_with_its_option_before_anything_starts(
    tmp_path: Path, ports: tuple[int, int], which: int, option: str
) -> None:
    with socket.create_server(("127.0.0.1", ports[which])), pytest.raises(PortInUseError) as caught:
        serve(tmp_path / "runs", *ports, never, ignore)
    assert caught.value.message == f"{option}={ports[which]}: the port is taken"
    assert caught.value.hint == f"choose another with {option}"
    assert not (tmp_path / "runs").exists()


def test_one_port_for_both_is_refused(tmp_path: Path, ports: tuple[int, int]) -> None:
    with pytest.raises(PortInUseError, match=f"--mlflow-port={ports[0]}: the port is taken"):
        serve(tmp_path / "runs", ports[0], ports[0], never, ignore)


def assert_only_its_user_is_answered(prefect: str, mlflow: str, auth: str) -> None:
    asked = {prefect: "/api/admin/version", mlflow: "/api/2.0/mlflow/experiments/get?experiment_id=0"}
    for server, path in asked.items():
        assert answer(server + path, auth) == 200
        assert answer(server + path, auth, Origin=server) == 200
        assert answer(server + path) == 401
        assert answer(server + path, "hlatctl:wrong") == 401
        for other in ("evil.example", "10.evil.example", "127.0.0.1.evil.example", "localhost"):
            assert answer(server + path, auth, Host=other) == 403
        for page in ("http://evil.example", "http://127.0.0.1:1", "null"):
            assert answer(server + path, auth, Origin=page) == 403
            assert answer(server + path, auth, "POST", Origin=page) == 403
    assert answer(f"{prefect}/api/flow_runs/filter", auth, "POST") == 403, "without a CSRF token"


def assert_nothing_is_for_others(runs_dir: Path) -> None:
    shared = [path for path in (runs_dir, *runs_dir.rglob("*")) if path.stat().st_mode & 0o077]
    assert shared == []


def test_both_pages_are_served_until_one_server_ends(
    tmp_path: Path, ports: tuple[int, int], start: Callable[[], subprocess.Popen[str]]
) -> None:
    runs_dir = tmp_path / "runs"
    ui = start()
    assert ui.stdout
    prefect, mlflow = (f"http://127.0.0.1:{port}" for port in ports)
    mlflow_page = f"{mlflow}/#/experiments?workflowType=machine_learning"
    assert ui.stdout.readline().strip() == str([("mlflow", mlflow_page), ("prefect", prefect)])
    auth = ui.stdout.readline().strip()
    assert "<title>Prefect" in fetch(prefect)
    assert f"{prefect}/api" in fetch(f"{prefect}/ui-settings")
    assert "<title>MLflow" in fetch(mlflow, auth)
    assert ui_record.read(runs_dir) == ui_record.UiRecord(auth=auth, prefect=prefect, mlflow=mlflow)
    assert_only_its_user_is_answered(prefect, mlflow, auth)
    assert_nothing_is_for_others(runs_dir)
    with pytest.raises(RunBusyError, match="is serving it"):
        serve(runs_dir, 0, 0, never, ignore)
    pids = children(ui.pid)
    assert all(auth.partition(":")[2] not in Path(f"/proc/{pid}/cmdline").read_text() for pid in (ui.pid, *pids))
    os.kill(pids[1], signal.SIGKILL)
    _, error = ui.communicate(timeout=WAIT_S)
    assert ui.returncode == 19
    log = runs_dir / ".ui" / "mlflow.log"
    assert error == f"error: mlflow's server has ended unexpectedly (exit code -9)\nhint: see {log}\n"
    wait_for(lambda: not groups_alive(pids))  # the kernel needs a moment to end killed processes
    assert not ui_record.ui_file(runs_dir).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_they_start_leaves_no_process(
    start: Callable[[], subprocess.Popen[str]], number: signal.Signals
) -> None:
    ui = start()
    servers = wait_for(lambda: pids if len(pids := children(ui.pid)) == 2 else None)
    assert servers
    ui.send_signal(number)
    output, error = ui.communicate(timeout=WAIT_S)
    assert (ui.returncode, output, error) == (0, "", "")
    assert groups_alive(servers) == []


class Late:
    """A server process that never answers."""

    def __init__(self, name: str, folder: Path) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        server = ui.Server(name, listener, (), "/", {})
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.started = ui._Started(server, process, folder / f"{name}.log")


@pytest.fixture
def late(tmp_path: Path) -> Iterator[list[ui._Started]]:
    made = [Late(name, tmp_path) for name in ("prefect", "mlflow")]
    yield [one.started for one in made]
    for one in made:
        one.started.process.kill()
        one.started.process.wait()
        one.started.server.listener.close()


def test_a_late_server_is_reported_and_then_omitted(late: list[ui._Started], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "_START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(local_server, "_SAY_EVERY_S", 0.0)
    monkeypatch.setattr(ui, "_is_up", lambda server: server.name == "mlflow")
    said: list[str] = []
    assert ui._wait_until_up(late, threading.Event(), said.append) == [late[1]]
    assert said[0].startswith("waiting for prefect")
    assert said[-1].startswith("prefect does not answer after 0 s, see ")
    assert said[-1].endswith("; continuing without it")
    assert late[0].process.poll() is not None


def test_servers_that_all_are_late_are_an_error(late: list[ui._Started], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "_START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(ui, "_is_up", lambda server: False)
    with pytest.raises(LaunchError, match="prefect does not answer"):
        ui._wait_until_up(late, threading.Event(), ignore)
