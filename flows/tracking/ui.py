"""Prefect's and MLflow's servers behind the page of `hlatctl ui`, for their own user on this machine only.

Neither a run nor the page needs them. While the servers run, this user's flows find their addresses and their password
in ``flows.tracking.ui_record``.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from flows.runtime import programs
from flows.tracking import local_server, prefect_api, ui_record
from flows.tracking.local_server import HOST
from flows.tracking.ui_record import UiRecord
from hlatctl.run import files
from hlatctl.run.errors import PortInUseError, StorageError, cannot_write

#: On a busy machine, importing both servers takes minutes.
START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0
_END_POLL_S = 0.02
NAMES = ("prefect", "mlflow")
#: State of a server that was not requested.
OFF: dict[str, Any] = {"state": "off", "url": None, "waited_s": None, "log": None, "message": ""}


@dataclass(frozen=True)
class Server:
    """One server to start.

    Args:
        name: ``prefect`` or ``mlflow``; names its log and its option, ``--<name>-port``.
        listener: socket bound to its port on loopback.
        argv: arguments after ``python -m flows.tracking.servers NAME FD``.
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


@dataclass
class _Started:
    """A server with its process and log, and its state: ``starting``, ``up`` or ``failed``."""

    server: Server
    process: subprocess.Popen[bytes]
    log: Path
    began_s: float
    state: str = "starting"
    up_s: float = 0.0
    message: str = ""

    def as_json(self) -> dict[str, Any]:
        is_up = self.state == "up"
        return {
            "state": self.state,
            "url": self.server.url + self.server.page if is_up else None,
            "waited_s": round((self.up_s or time.monotonic()) - self.began_s, 1),
            "log": os.fspath(self.log),
            "message": self.message,
        }


class Servers:
    """Prefect's and MLflow's servers, each of which may start late or die. One thread calls :meth:`look`.

    Args:
        runs_dir: the folder of the runs to show.
        auth: ``USER:PASSWORD`` for both servers.
    """

    def __init__(self, runs_dir: Path, auth: str) -> None:
        self._runs_dir, self.auth = runs_dir, auth
        self._started: list[_Started] = []
        self._told: dict[str, str] = {}
        self._marking: subprocess.Popen[bytes] | None = None

    def states(self) -> dict[str, Any]:
        """Return the state of each server, as in the page's ``/api/info``."""
        return {**dict.fromkeys(NAMES, OFF), **{one.server.name: one.as_json() for one in self._started}}

    def look(self) -> list[str]:
        """Update the servers' states, tell this user's flows which ones answer, and return what changed in words."""
        news = [text for one in self._started if (text := _look_at(one))]
        urls = {one.server.name: one.server.url for one in self._started if one.state == "up"}
        if urls != self._told:
            self._told = urls
            ui_record.write(self._runs_dir, UiRecord(auth=self.auth, **urls))
        if "prefect" in urls and self._marking is None:
            self._marking = _mark_crashed_flows(self._runs_dir)
        return news

    def start(self, servers: list[Server]) -> None:
        """Start servers, each on its socket."""
        for server in servers:
            log = ui_record.ui_dir(self._runs_dir) / f"{server.name}.log"
            self._started.append(_Started(server, _spawned(server, log), log, time.monotonic()))

    def stop(self) -> None:
        """Stop all servers, and return when they have ended."""
        marking = [self._marking] if self._marking else []
        ui_record.ui_file(self._runs_dir).unlink(missing_ok=True)
        _stop_all([*(one.process for one in self._started), *marking])


@contextmanager
def behind(runs_dir: Path, listeners: Sequence[socket.socket]) -> Iterator[Servers]:
    """Yield both servers while they start; stop them after the block.

    The caller must be the ``ui_record.only_ui`` of the folder.

    Args:
        runs_dir: the folder of the runs to show.
        listeners: sockets bound to Prefect's and to MLflow's port.

    Raises:
        StorageError: the runs folder can't be written.
    """
    servers = Servers(runs_dir, local_server.new_auth())
    prefect, mlflow = listeners
    with ExitStack() as stack:
        stack.callback(servers.stop)
        wanted = [_prefect(runs_dir, prefect, servers.auth), _mlflow(runs_dir, mlflow, servers.auth)]
        with files.created_with(files.PRIVATE):
            make_folder(Path(wanted[0].env["PREFECT_HOME"]))
            servers.start(wanted)
        yield servers


def _prefect(runs_dir: Path, listener: socket.socket, auth: str) -> Server:
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    env |= {**prefect_api.settings(runs_dir), local_server.AUTH_ENV: auth}
    return Server("prefect", listener, ("--pages",), "/api/health", env, local_server.login_page(auth))


def _mlflow(runs_dir: Path, listener: socket.socket, auth: str) -> Server:
    env = {**os.environ, local_server.AUTH_ENV: auth}
    # By default, the pages show agents and traces instead of runs.
    page = "/#/experiments?workflowType=machine_learning"
    return Server("mlflow", listener, (os.fspath(runs_dir),), "/health", env, page)


def make_folder(folder: Path) -> None:
    """Create a folder.

    Raises:
        StorageError: the folder can't be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None


def make_own_folder(folder: Path) -> None:
    """Create a folder that only this user can write.

    Links in a folder of another user could make this process write to this user's other files.

    Raises:
        StorageError: the folder can't be created, or another user owns it or can write to it.
    """
    make_folder(folder)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise StorageError(
            f"{folder}: can't be used (must be a folder that only this user can write to)",
            hint=f"`ls -ld {folder}` shows whose it is; move it away, or choose another folder with --runs-dir",
        )


def bound(name: str, port: int) -> socket.socket:
    """Return a socket that listens on a port, so that no other process can take it before the server is up.

    Args:
        name: name of the server; empty: the page.
        port: port on loopback.

    Raises:
        PortInUseError: the port is taken.
    """
    try:
        return socket.create_server((HOST, port))
    except OSError:
        option = f"--{name}-port" if name else "--port"
        raise PortInUseError(f"{option}={port}: the port is taken", hint=f"choose another with {option}") from None


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
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


def _spawned(server: Server, log: Path) -> subprocess.Popen[bytes]:
    fd = server.listener.fileno()
    with log.open("wb") as output:
        return programs.start_alongside(
            programs.python_command("flows.tracking.servers", server.name, str(fd), *server.argv),
            output,
            stdin=subprocess.PIPE,
            env=server.env,
            pass_fds=[fd],
            cwd=log.parent,
        )


def _look_at(one: _Started) -> str:
    code = _exit_code(one.process)
    if one.state == "failed":
        return ""
    if code is not None:
        one.state, one.message = "failed", f"{one.server.name}'s server has ended unexpectedly (exit code {code})"
        one.server.listener.close()  # otherwise requests would wait in its queue forever
        return f"{one.message}, see {one.log}"
    if one.state == "starting" and _is_up(one.server):
        one.state, one.up_s = "up", time.monotonic()
        return f"{one.server.name}\t{one.server.url + one.server.page}"
    if one.state == "starting" and time.monotonic() - one.began_s > START_TIMEOUT_S:
        _stop_all([one.process])
        one.server.listener.close()
        one.state, one.message = "failed", f"{one.server.name} does not answer after {START_TIMEOUT_S:.0f} s"
        return f"{one.message}, see {one.log}"
    return ""


def _mark_crashed_flows(runs_dir: Path) -> subprocess.Popen[bytes]:
    """Run ``prefect_stale`` in a separate process, because importing Prefect takes seconds."""
    with files.created_with(files.PRIVATE), (ui_record.ui_dir(runs_dir) / "stale.log").open("wb") as log:
        own = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        return programs.start_alongside(
            programs.python_command("flows.tracking.prefect_stale", os.fspath(runs_dir)), log, env=own
        )


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


def _is_up(server: Server) -> bool:
    try:
        local_server.get(server.url + server.health)
    except OSError:
        return False
    return True
