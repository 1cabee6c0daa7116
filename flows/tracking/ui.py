"""Prefect's and MLflow's web pages for one runs folder, for its own user on this machine only.

A run needs neither. While they are up, ``flows.tracking.ui_record`` tells this user's flows where to report to, and the
password that ``flows.tracking.local_server`` asks for.
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

#: A busy machine takes minutes to import what the two need; nobody waits for longer than this.
_START_TIMEOUT_S = 600.0
_TELL_EVERY_S = 10.0
_STOP_TIMEOUT_S = 10.0
_LOOK_S = 0.2
_END_POLL_S = 0.02


@dataclass(frozen=True)
class Server:
    """One server to start.

    Args:
        name: ``prefect`` or ``mlflow``; names its log and its option, ``--<name>-port``.
        listener: bound to its port on loopback.
        argv: what follows ``python -m flows.<name>_server FD``.
        health: path that answers 200 once it is up, without the password.
        env: the whole environment.
        page: where on the server a person should begin.
    """

    name: str
    listener: socket.socket
    argv: tuple[str, ...]
    health: str
    env: dict[str, str]
    page: str = ""

    @property
    def url(self) -> str:
        """Its address."""
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
        runs_dir: whose runs to show; made if it is not there.
        prefect_port: on loopback.
        mlflow_port: on loopback.
        on_ready: called once with the pages that answer, ``{"prefect": url, "mlflow": url}``, and with
            ``USER:PASSWORD``.
        say: told what is waited for, and which server does not start.

    Raises:
        PortInUseError: before anything has been started.
        RunBusyError: another process serves this runs folder.
        LaunchError: no server starts, or one has ended by itself.
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
            stack.enter_context(_looking_for_dead_flows(runs_dir))
        on_ready({one.server.name: one.server.url + one.server.page for one in up}, auth)
        while not stopped.wait(_LOOK_S):
            _check_alive(up)


def _prefect(runs_dir: Path, listener: socket.socket, auth: str) -> Server:
    """Prefect's server over the database that flows of this runs folder write."""
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    env |= {**prefect_api.settings(runs_dir), local_server.AUTH_ENV: auth}
    return Server("prefect", listener, ("--pages",), "/api/health", env)


def _mlflow(runs_dir: Path, listener: socket.socket, auth: str) -> Server:
    """MLflow's server over the database that the mirror fills by default."""
    env = {**os.environ, local_server.AUTH_ENV: auth}
    # Without being told, its pages show what there is of agents and traces: nothing.
    page = "/#/experiments?workflowType=machine_learning"
    return Server("mlflow", listener, (os.fspath(runs_dir),), "/health", env, page)


def _make_folders(runs_dir: Path, prefect_home: Path) -> None:
    try:
        for folder in (ui_record.ui_dir(runs_dir), prefect_home):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(f"runs_dir={runs_dir}", error) from None


def _bound(name: str, port: int) -> socket.socket:
    """A socket that listens on a port, so that nobody else can take it before the server is up."""
    try:
        return socket.create_server((HOST, port))
    except OSError:
        option = f"--{name}-port"
        raise PortInUseError(f"{option}={port}: the port is taken", hint=f"choose another with {option}") from None


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
def _looking_for_dead_flows(runs_dir: Path) -> Iterator[None]:
    """Beside the servers, for importing Prefect takes seconds."""
    with (ui_record.ui_dir(runs_dir) / "stale.log").open("wb") as log:
        own = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        process = spawn.beside(spawn.command("flows.tracking.prefect_stale", os.fspath(runs_dir)), log, env=own)
    try:
        yield
    finally:
        _stop_all([process])


def _stop_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """End each server's whole process group: both may start processes of their own."""
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
    """The exit code of a server that has ended, -n if signal n ended it.

    It stays a zombie: so its process group, in which its workers may live on, keeps its number until it is signalled.
    """
    if process.returncode is not None:
        return process.returncode
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.returncode is None:  # later, the number may be another group's
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _wait_until_up(started: list[_Started], stopped: threading.Event, say: Callable[[str], None]) -> list[_Started]:
    """The servers that answer; none if we were asked to stop before that.

    Raises:
        LaunchError: one has ended by itself, or none answers in time.
    """
    began_s = told_s = time.monotonic()
    up: list[_Started] = []
    while waiting := [one for one in started if one not in up]:
        if stopped.wait(_LOOK_S):
            return []
        _check_alive(started)
        up += [one for one in waiting if _is_up(one.server)]
        names, waited_s = " and ".join(one.server.name for one in waiting), time.monotonic() - began_s
        if waited_s > _START_TIMEOUT_S:
            break
        if time.monotonic() - told_s > _TELL_EVERY_S:
            told_s = time.monotonic()
            say(f"waiting for {names} to start, {waited_s:.0f} s so far; logs: {waiting[0].log.parent}")
    return _without_the_late(started, [one for one in started if one in up], say)


def _without_the_late(started: list[_Started], up: list[_Started], say: Callable[[str], None]) -> list[_Started]:
    late = [one for one in started if one not in up]
    for one in late:
        message = f"{one.server.name} does not answer after {_START_TIMEOUT_S:.0f} s"
        if not up:
            raise LaunchError(message, hint=f"see {one.log}")
        say(f"{message}, see {one.log}; going on without it")
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
                f"{one.server.name}'s server has ended by itself (exit code {code})", hint=f"see {one.log}"
            )
