"""Serves Prefect's and MLflow's web pages for one runs folder, to its own user on this machine only.

A run needs neither. While the servers run, this user's flows find their addresses and their password in
``flows.tracking.ui_record``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from flows.runtime import spawn
from flows.tracking import local_server, prefect_api, ui_record
from flows.tracking.local_server import HOST
from flows.tracking.ui_record import UiRecord
from hlatctl.run import files
from hlatctl.run.errors import LaunchError, PortInUseError, cannot_write

#: On a busy machine, importing both servers takes minutes.
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0
_LOOK_S = 0.2
_END_POLL_S = 0.02


@dataclass(frozen=True)
class Server:
    """One server to start.

    Args:
        name: ``prefect`` or ``mlflow``; names its log and its option, ``--<name>-port``.
        listener: bound to its port on loopback.
        argv: arguments after ``python -m flows.tracking.<name>_server FD``.
        health: path that answers 200 without a password when the server is up.
        env: the whole environment.
        page: path of the page to open first.
    """

    name: str
    listener: socket.socket
    argv: tuple[str, ...]
    health: str
    env: dict[str, str]
    page: str = ""

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://{HOST}:{self.listener.getsockname()[1]}"


@dataclass(frozen=True)
class _Started:
    """A server with its process and log."""

    server: Server
    process: subprocess.Popen[bytes]
    log: Path


def serve(
    runs_dir: Path,
    prefect_port: int,
    mlflow_port: int,
    on_ready: Callable[[dict[str, str], str], None],
    say: Callable[[str], None],
) -> None:
    """Serve both pages until Ctrl-C or SIGTERM; returns when both servers have ended.

    Args:
        runs_dir: the folder of the runs to show; created if it doesn't exist.
        prefect_port, mlflow_port: on loopback.
        on_ready: called once with the addresses of the pages, ``{"prefect": url, "mlflow": url}``, and with
            ``USER:PASSWORD``.
        say: called while waiting, and if a server does not start.

    Raises:
        PortInUseError: a port is taken; nothing was started.
        RunBusyError: another process serves this runs folder.
        LaunchError: no server starts, or one has ended unexpectedly.
        StorageError: the runs folder can't be written.
    """
    runs_dir, auth = runs_dir.absolute(), local_server.new_auth()
    with ExitStack() as stack:
        servers = [
            _prefect(runs_dir, stack.enter_context(_bound("prefect", prefect_port)), auth),
            _mlflow(runs_dir, stack.enter_context(_bound("mlflow", mlflow_port)), auth),
        ]
        stack.enter_context(files.created_with(files.PRIVATE))
        _make_folders(runs_dir, Path(servers[0].env["PREFECT_HOME"]))
        stack.enter_context(ui_record.only_ui(runs_dir))
        stopped = stack.enter_context(_stop_signal())
        started = stack.enter_context(_running(servers, ui_record.ui_dir(runs_dir)))
        if not (up := _wait_until_up(started, stopped, say)):
            return
        urls = {one.server.name: one.server.url for one in up}
        stack.enter_context(ui_record.announced(runs_dir, UiRecord(auth=auth, **urls)))
        if "prefect" in urls:
            stack.enter_context(_marking_crashed_flows(runs_dir))
        on_ready({one.server.name: one.server.url + one.server.page for one in up}, auth)
        while not stopped.wait(_LOOK_S):
            _check_alive(up)


def _prefect(runs_dir: Path, listener: socket.socket, auth: str) -> Server:
    """Return Prefect's server, on the database of this runs folder's flows."""
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    env |= {**prefect_api.settings(runs_dir), local_server.AUTH_ENV: auth}
    return Server("prefect", listener, ("--pages",), "/api/health", env)


def _mlflow(runs_dir: Path, listener: socket.socket, auth: str) -> Server:
    """Return MLflow's server, on the default database of this runs folder."""
    env = {**os.environ, local_server.AUTH_ENV: auth}
    # By default, the pages show agents and traces instead of runs.
    page = "/#/experiments?workflowType=machine_learning"
    return Server("mlflow", listener, (os.fspath(runs_dir),), "/health", env, page)


def _make_folders(runs_dir: Path, prefect_home: Path) -> None:
    try:
        for folder in (ui_record.ui_dir(runs_dir), prefect_home):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(f"runs_dir={runs_dir}", error) from None


def _bound(name: str, port: int) -> socket.socket:
    """Return a socket that listens on a port, so that no other process can take it before the server is up."""
    try:
        return socket.create_server((HOST, port))
    except OSError:
        option = f"--{name}-port"
        raise PortInUseError(f"{option}={port}: the port is taken", hint=f"choose another with {option}") from None


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """Yield an event that is set by Ctrl-C, SIGTERM and a closed terminal."""
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
def _running(servers: list[Server], logs: Path) -> Iterator[list[_Started]]:
    started: list[_Started] = []
    try:
        for server in servers:
            fd, log = server.listener.fileno(), logs / f"{server.name}.log"
            with log.open("wb") as output:
                process = spawn.beside(
                    spawn.command(f"flows.tracking.{server.name}_server", str(fd), *server.argv),
                    output,
                    stdin=subprocess.PIPE,
                    env=server.env,
                    pass_fds=[fd],
                    cwd=logs,
                )
            started.append(_Started(server, process, log))
        yield started
    finally:
        _stop_all([one.process for one in started])


@contextmanager
def _marking_crashed_flows(runs_dir: Path) -> Iterator[None]:
    """Run ``prefect_stale`` in a separate process, because importing Prefect takes seconds."""
    with (ui_record.ui_dir(runs_dir) / "stale.log").open("wb") as log:
        own = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        process = spawn.beside(spawn.command("flows.tracking.prefect_stale", os.fspath(runs_dir)), log, env=own)
    try:
        yield
    finally:
        _stop_all([process])


def _stop_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """End each server's whole process group: a server may start further processes."""
    for process in processes:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    for process in processes:
        while _exit_code(process) is None and time.monotonic() < deadline:
            time.sleep(_END_POLL_S)
        _signal_group(process, signal.SIGKILL)
        process.wait()
        if process.stdin:
            process.stdin.close()


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a server that has ended, -n for signal n; None while it runs.

    The server stays a zombie, so that the number of its process group, which may have workers, isn't reused before it
    is signalled.
    """
    if process.returncode is not None:
        return process.returncode
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.returncode is None:  # otherwise the number may belong to another group
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _wait_until_up(started: list[_Started], stopped: threading.Event, say: Callable[[str], None]) -> list[_Started]:
    """Wait for the servers, and return those that answer; none if stopped before that.

    Raises:
        LaunchError: one has ended unexpectedly, or none answers in time.
    """
    wait, up = local_server.Wait(say), list[_Started]()
    while waiting := [one for one in started if one not in up]:
        if stopped.wait(_LOOK_S):
            return []
        _check_alive(started)
        up += [one for one in waiting if _is_up(one.server)]
        names = " and ".join(one.server.name for one in waiting)
        if wait.so_far_s(names, f"; logs: {waiting[0].log.parent}") > _START_TIMEOUT_S:
            break
    return _without_late(started, [one for one in started if one in up], say)


def _without_late(started: list[_Started], up: list[_Started], say: Callable[[str], None]) -> list[_Started]:
    late = [one for one in started if one not in up]
    for one in late:
        message = f"{one.server.name} does not answer after {_START_TIMEOUT_S:.0f} s"
        if not up:
            raise LaunchError(message, hint=f"see {one.log}")
        say(f"{message}, see {one.log}; continuing without it")
    _stop_all([one.process for one in late])
    return up


def _is_up(server: Server) -> bool:
    try:
        local_server.get(server.url + server.health)
    except OSError:
        return False
    return True


def _check_alive(started: list[_Started]) -> None:
    for one in started:
        code = _exit_code(one.process)
        if code is not None:
            raise LaunchError(
                f"{one.server.name}'s server has ended unexpectedly (exit code {code})", hint=f"see {one.log}"
            )
