"""`hlatctl ui`'s servers come up together, go down together, and say which port is taken. They are the real ones."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows import prefect_env
from flows.servers import serve
from hlatctl.run.errors import PortInUseError

SERVE = """
import sys
from pathlib import Path
from flows.servers import serve
from hlatctl.run.errors import run_main

def main():
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), lambda found: print(sorted(found.items()), flush=True))
    return 0

sys.exit(run_main(main))
"""


def never(_addresses: dict[str, str]) -> None:
    raise AssertionError("nothing is ready")


@pytest.fixture
def ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


@pytest.fixture
def start(tmp_path: Path, ports: tuple[int, int]) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run_it() -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", SERVE, str(tmp_path / "runs"), *map(str, ports)]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run_it
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def groups_alive(leaders: list[int]) -> list[int]:
    """Process groups that still have a member; what is left as a zombie of init counts as gone."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) in leaders and state != "Z":
            alive.append(int(group))
    return alive


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


@pytest.mark.parametrize(("which", "option"), [(0, "--prefect-port"), (1, "--mlflow-port")])
def test_a_taken_port_is_named_with_its_option_before_anything_starts(
    tmp_path: Path, ports: tuple[int, int], which: int, option: str
) -> None:
    with socket.create_server(("127.0.0.1", ports[which])), pytest.raises(PortInUseError) as caught:
        serve(tmp_path / "runs", *ports, never)
    assert caught.value.message == f"{option}={ports[which]}: the port is taken"
    assert caught.value.hint == f"choose another with {option}"
    assert not (tmp_path / "runs").exists()


def test_one_port_for_both_is_refused(tmp_path: Path, ports: tuple[int, int]) -> None:
    with pytest.raises(PortInUseError, match=f"--mlflow-port={ports[0]}: the port is taken"):
        serve(tmp_path / "runs", ports[0], ports[0], never)


def test_both_pages_are_served_until_one_server_ends(
    tmp_path: Path, ports: tuple[int, int], start: Callable[[], subprocess.Popen[str]]
) -> None:
    runs_dir = tmp_path / "runs"
    ui = start()
    assert ui.stdout
    prefect, mlflow = (f"http://127.0.0.1:{port}" for port in ports)
    mlflow_page = f"{mlflow}/#/experiments?workflowType=machine_learning"
    assert ui.stdout.readline().strip() == str([("mlflow", mlflow_page), ("prefect", prefect)])
    assert "<title>Prefect" in fetch(prefect)
    assert f"{prefect}/api" in fetch(f"{prefect}/ui-settings")
    assert "<title>MLflow" in fetch(mlflow)
    assert prefect_env.ui_api_url(runs_dir) == f"{prefect}/api"
    servers = children(ui.pid)
    os.kill(servers[1], signal.SIGKILL)
    _, error = ui.communicate(timeout=60)
    assert ui.returncode == 19
    log = runs_dir / ".ui" / "mlflow.log"
    assert error == f"error: mlflow's server has ended by itself (exit code -9)\nhint: see {log}\n"
    deadline = time.monotonic() + 10.0
    while groups_alive(servers):  # the kernel takes its time with what has been killed
        assert time.monotonic() < deadline, "something of them still runs"
        time.sleep(0.05)
    assert not prefect_env.ui_file(runs_dir).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_they_start_leaves_no_process(
    start: Callable[[], subprocess.Popen[str]], number: signal.Signals
) -> None:
    ui = start()
    deadline_s = time.monotonic() + 60
    while len(servers := children(ui.pid)) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    ui.send_signal(number)
    output, error = ui.communicate(timeout=60)
    assert (ui.returncode, output, error) == (0, "", "")
    assert groups_alive(servers) == []
