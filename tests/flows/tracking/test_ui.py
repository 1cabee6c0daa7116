"""The page of `hlatctl ui` and the servers behind it: the page first, and without those that fail. They are real."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from flows.live.serve import Options, serve
from flows.tracking import local_server, ui, ui_record
from hlatctl.run.errors import PortInUseError, RunBusyError, StorageError
from tests.ports import free_ports
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.processes

SERVE = """
import sys
from pathlib import Path
from flows.live.serve import Options, serve
from hlatctl.run.errors import run_main

def main():
    show = lambda link, auth: print(link, auth, sep="\\n", flush=True)
    ports = dict(zip(("port", "prefect_port", "mlflow_port"), map(int, sys.argv[2:])))
    serve(Path(sys.argv[1]), Options(**ports), show, lambda text: print(text, flush=True))
    return 0

sys.exit(run_main(main))
"""


def never(_link: str, _auth: str) -> None:
    raise AssertionError("nothing is ready")


def ignore(_text: str) -> None:
    """Ignore the message."""


def options(ports: tuple[int, int]) -> Options:
    return Options(port=0, prefect_port=ports[0], mlflow_port=ports[1])


@pytest.fixture
def ports() -> tuple[int, int]:
    first, second = free_ports(2)
    return first, second


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
            "0",
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
        serve(tmp_path / "runs", options(ports), never, ignore)
    assert caught.value.message == f"{option}={ports[which]}: the port is taken"
    assert caught.value.hint == f"choose another with {option}"
    assert not (tmp_path / "runs").exists()


def test_one_port_for_both_is_refused(tmp_path: Path, ports: tuple[int, int]) -> None:
    with pytest.raises(PortInUseError, match=f"--mlflow-port={ports[0]}: the port is taken"):
        serve(tmp_path / "runs", options((ports[0], ports[0])), never, ignore)


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


def test_the_page_outlives_a_server_behind_it(
    tmp_path: Path, ports: tuple[int, int], start: Callable[[], subprocess.Popen[str]]
) -> None:
    runs_dir = tmp_path / "runs"
    page = start()
    assert page.stdout
    address, _, token = page.stdout.readline().strip().partition("/?token=")
    auth = page.stdout.readline().strip()
    prefect, mlflow = (f"http://127.0.0.1:{port}" for port in ports)
    assert servers(address, token)["prefect"]["state"] == "starting", "the page is there first"
    told = sorted(page.stdout.readline().strip() for _ in range(2))
    login = f"{prefect}{local_server.login_page(auth)}"
    assert told == [f"mlflow\t{mlflow}/#/experiments?workflowType=machine_learning", f"prefect\t{login}"]
    page_of_login = fetch(login.partition("#")[0])
    assert "prefect-password" in page_of_login
    assert "replace(location.origin" in page_of_login, "a link leads to no other server"
    assert servers(address, token)["mlflow"]["auth"] == auth
    assert "<title>Prefect" in fetch(prefect)
    assert f"{prefect}/api" in fetch(f"{prefect}/ui-settings")
    assert "<title>MLflow" in fetch(mlflow, auth)
    wait_for(lambda: ui_record.read(runs_dir) == ui_record.UiRecord(auth=auth, prefect=prefect, mlflow=mlflow))
    assert_only_its_user_is_answered(prefect, mlflow, auth)
    assert answer(f"{address}/api/runs") == 401
    assert_nothing_is_for_others(runs_dir)
    with pytest.raises(RunBusyError, match="is serving it"):
        serve(runs_dir, options((0, 0)), never, ignore)
    pids = children(page.pid)
    assert all(auth.partition(":")[2] not in Path(f"/proc/{pid}/cmdline").read_text() for pid in (page.pid, *pids))
    os.kill(pids[0], signal.SIGKILL)
    log = runs_dir / ".ui" / "prefect.log"
    message = "prefect's server has ended unexpectedly (exit code -9)"
    assert page.stdout.readline().strip() == f"{message}, see {log}"
    assert servers(address, token)["prefect"] == {
        **servers(address, token)["prefect"],
        "state": "failed",
        "url": None,
        "message": message,
    }
    assert servers(address, token)["mlflow"]["state"] == "up"
    wait_for(lambda: ui_record.read(runs_dir) == ui_record.UiRecord(auth=auth, mlflow=mlflow))
    page.terminate()
    _, error = page.communicate(timeout=WAIT_S)
    assert (page.returncode, error) == (0, "")
    wait_for(lambda: not groups_alive(pids))  # the kernel needs a moment to end killed processes
    assert not ui_record.ui_file(runs_dir).exists()


def servers(address: str, token: str) -> Any:
    request = urllib.request.Request(f"{address}/api/info", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=WAIT_S) as response:
        return json.loads(response.read())["servers"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_they_start_leaves_no_process(
    start: Callable[[], subprocess.Popen[str]], number: signal.Signals
) -> None:
    ui = start()
    begun = wait_for(lambda: pids if len(pids := children(ui.pid)) == 2 else None)
    assert begun
    ui.send_signal(number)
    _, error = ui.communicate(timeout=WAIT_S)
    assert (ui.returncode, error) == (0, "")
    wait_for(lambda: not groups_alive(begun))  # as above


@pytest.fixture
def late(tmp_path: Path) -> Iterator[ui.Servers]:
    """A server whose process never answers."""
    ui_record.ui_dir(tmp_path).mkdir()
    found = ui.Servers(tmp_path, "hlatctl:password")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        server = ui.Server("mlflow", listener, (), "/", {})
        found._started = [ui._Started(server, process, tmp_path / "mlflow.log", time.monotonic())]
        yield found
        found.stop()


def test_a_late_server_is_stopped_and_shown(late: ui.Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "_is_up", lambda server: False)
    assert late.look() == []
    assert late.states()["mlflow"]["state"] == "starting"
    monkeypatch.setattr(ui, "START_TIMEOUT_S", 0.0)
    (said,) = late.look()
    assert said.startswith("mlflow does not answer after 0 s, see ")
    assert late.states()["mlflow"]["state"] == "failed"
    assert late.states()["prefect"] == ui.OFF
    assert late._started[0].process.poll() is not None
    assert late.look() == []


@pytest.mark.parametrize("how", ["others can write", "a link", "another user's"])
def test_a_folder_that_others_can_fill_with_links_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, precious = ui_record.ui_dir(tmp_path), tmp_path / "precious"
    precious.write_text("precious")
    folder.mkdir(mode=0o700)
    (folder / "page.log").symlink_to(precious)
    if how == "others can write":
        folder.chmod(0o777)
    elif how == "a link":
        folder.symlink_to(folder.rename(tmp_path / "elsewhere"))
    else:
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(StorageError, match="only this user can write"):
        serve(tmp_path, Options(port=0, page_only=True), lambda link, auth: None, lambda text: None)
    assert precious.read_text() == "precious"
