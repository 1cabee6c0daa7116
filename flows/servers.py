"""Prefect's and MLflow's web pages for one runs folder, on this machine only.

A run needs neither. While both are up, ``<runs_dir>/.ui.json`` tells flows where to report to.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from flows import mirror, prefect_env
from hlatctl.run import files
from hlatctl.run.errors import LaunchError, PortInUseError, StorageError

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 10.0
_LOOK_S = 0.2
_END_POLL_S = 0.02


@dataclass(frozen=True)
class Server:
    """One server to start.

    Args:
        name: ``prefect`` or ``mlflow``; names its log and its option, ``--<name>-port``.
        port: on loopback.
        argv: what follows ``python -m``.
        health: path that answers 200 once it is up.
        env: the whole environment.
        page: where on the server a person should begin.
    """

    name: str
    port: int
    argv: tuple[str, ...]
    health: str
    env: dict[str, str]
    page: str = ""

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{_HOST}:{self.port}"


def serve(runs_dir: Path, prefect_port: int, mlflow_port: int, on_ready: Callable[[dict[str, str]], None]) -> None:
    """Serve both pages until Ctrl-C or SIGTERM; returns when both servers have ended.

    Args:
        runs_dir: whose runs to show; made if it is not there.
        prefect_port: on loopback.
        mlflow_port: on loopback.
        on_ready: called once with the pages, ``{"prefect": url, "mlflow": url}``, when both answer.

    Raises:
        PortInUseError: before anything has been started.
        LaunchError: a server does not start, or has ended by itself.
        StorageError: the runs folder can't be written.
    """
    runs_dir = runs_dir.absolute()
    servers = [prefect_server(runs_dir, prefect_port), mlflow_server(runs_dir, mlflow_port)]
    _check_ports(servers)
    logs = runs_dir / ".ui"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        Path(servers[0].env["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"runs_dir={runs_dir}: can't be written ({error.strerror})") from None
    with _stop_signal() as stopped, _running(servers, logs) as processes:
        if not _wait_until_up(servers, processes, logs, stopped):
            return
        with _announced(runs_dir, {server.name: server.url for server in servers}):
            on_ready({server.name: server.url + server.page for server in servers})
            while not stopped.wait(_LOOK_S):
                _check_alive(servers, processes, logs)


def prefect_server(runs_dir: Path, port: int) -> Server:
    """Prefect's server over the database that flows of this runs folder write."""
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    env |= prefect_env.settings(runs_dir)
    # Its pages would look for the API on port 4200, whatever port they are served from.
    env |= {"PREFECT_UI_API_URL": f"http://{_HOST}:{port}/api", "PREFECT_UI_SHOW_PROMOTIONAL_CONTENT": "false"}
    argv = ("prefect", "server", "start", "--host", _HOST, "--port", str(port))
    return Server("prefect", port, argv, "/api/health", env)


def mlflow_server(runs_dir: Path, port: int) -> Server:
    """MLflow's server over the database that the mirror fills by default."""
    argv = (
        "mlflow", "server", "--host", _HOST, "--port", str(port), "--workers", "1",
        "--backend-store-uri", mirror.default_tracking_uri(runs_dir),
        "--artifacts-destination", str(mirror.artifacts_dir(runs_dir)),
    )  # fmt: skip
    env = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    # Without being told, its pages show what there is of agents and traces: nothing.
    return Server("mlflow", port, argv, "/health", env, page="/#/experiments?workflowType=machine_learning")


def _check_ports(servers: list[Server]) -> None:
    taken: set[int] = set()
    for server in servers:
        option = f"--{server.name}-port"
        error = PortInUseError(f"{option}={server.port}: the port is taken", hint=f"choose another with {option}")
        if server.port in taken:
            raise error
        taken.add(server.port)
        with socket.socket() as probe:
            # A port whose last connections are only fading away is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, server.port))
            except OSError:
                raise error from None


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C, SIGTERM and a closed terminal set."""
    stopped = threading.Event()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _running(servers: list[Server], logs: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for server in servers:
            with (logs / f"{server.name}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", *server.argv],
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                        env=server.env, cwd=logs, start_new_session=True,
                    )
                )  # fmt: skip
        yield processes
    finally:
        _stop_all(processes)


def _stop_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """End each server's whole process group: both start workers of their own."""
    for process in processes:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    for process in processes:
        while _exit_code(process) is None and time.monotonic() < deadline:
            time.sleep(_END_POLL_S)
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a server that has ended, -n if signal n ended it.

    It stays a zombie: so its process group, in which its workers may live on, keeps its number until it is signalled.
    """
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _wait_until_up(
    servers: list[Server], processes: list[subprocess.Popen[bytes]], logs: Path, stopped: threading.Event
) -> bool:
    """Whether all answer; False if we were asked to stop before that."""
    looks_left = int(_START_TIMEOUT_S / _LOOK_S)
    waiting = list(servers)
    while waiting:
        if stopped.wait(_LOOK_S):
            return False
        _check_alive(servers, processes, logs)
        waiting = [server for server in waiting if not _is_up(server)]
        looks_left -= 1
        if waiting and looks_left <= 0:
            name = waiting[0].name
            raise LaunchError(f"{name} does not answer after {_START_TIMEOUT_S:.0f} s", hint=f"see {logs / name}.log")
    return True


def _is_up(server: Server) -> bool:
    try:
        with urllib.request.urlopen(server.url + server.health, timeout=1):
            return True
    except OSError:
        return False


def _check_alive(servers: list[Server], processes: list[subprocess.Popen[bytes]], logs: Path) -> None:
    for server, process in zip(servers, processes, strict=True):
        code = _exit_code(process)
        if code is not None:
            raise LaunchError(
                f"{server.name}'s server has ended by itself (exit code {code})",
                hint=f"see {logs / server.name}.log",
            )


@contextmanager
def _announced(runs_dir: Path, addresses: dict[str, str]) -> Iterator[None]:
    path = prefect_env.ui_file(runs_dir)
    files.write_json(path, {"v": 1, "pid": os.getpid(), **addresses})
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
