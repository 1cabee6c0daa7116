"""Runs the page: its web server in a thread, and Prefect's and MLflow's servers behind it, until Ctrl-C."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.live.session import kept_token
from flows.tracking import ui, ui_record
from flows.tracking.local_server import HOST
from hlatctl.run import files
from hlatctl.run.errors import LaunchError

if TYPE_CHECKING:
    from flows.live.stream import Watcher

_LOOK_S = 0.2
#: A thread that reads a long journal gives way to requests after this time: they wait for it again and again.
_SWITCH_S = 0.001
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `hlatctl ui` serves.

    Args:
        port, prefect_port, mlflow_port: ports on loopback; 0: any free one.
        page_only: start neither Prefect's nor MLflow's server.
        allow_control: the page may change runs.
    """

    port: int = 8400
    prefect_port: int = 4200
    mlflow_port: int = 5000
    page_only: bool = False
    allow_control: bool = False


def serve(runs_dir: Path, options: Options, on_ready: Callable[[str, str], None], say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C or SIGTERM; returns when all servers have ended.

    Args:
        runs_dir: the folder of the runs to show; created if it doesn't exist.
        on_ready: called once with the page's link, and with ``USER:PASSWORD`` for the pages of Prefect and MLflow;
            empty if these are not started.
        say: called when a server answers, or has ended.

    Raises:
        PortInUseError: a port is taken; nothing was started.
        RunBusyError: another process serves this runs folder.
        StorageError: the runs folder can't be written, or another user can write to the page's own folder.
    """
    runs_dir = runs_dir.absolute()
    folder = ui_record.ui_dir(runs_dir)
    with ExitStack() as stack:
        listener = stack.enter_context(ui.bound("", options.port))
        ports = () if options.page_only else (options.prefect_port, options.mlflow_port)
        listeners = [stack.enter_context(ui.bound(*pair)) for pair in zip(ui.NAMES, ports, strict=False)]
        with files.created_with(files.PRIVATE):  # drivers that the page starts must not inherit it
            ui.make_own_folder(folder)
            stack.enter_context(ui_record.only_ui(runs_dir))
            token = kept_token(folder)
            stack.enter_context(_logged(folder / "page.log"))
        stopped = stack.enter_context(ui.stop_signal())
        behind = stack.enter_context(ui.behind(runs_dir, listeners)) if listeners else None
        port = int(listener.getsockname()[1])
        # The socket already listens: a browser that is quicker than the imports below waits for them.
        on_ready(f"http://{HOST}:{port}/?token={token}", behind.auth if behind else "")
        _serve(runs_dir, options, listener, token, behind, stopped, say)


def _serve(
    runs_dir: Path,
    options: Options,
    listener: socket.socket,
    token: str,
    behind: ui.Servers | None,
    stopped: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Serve until ``stopped``. The web framework and the runs' readers take a second to import."""
    from flows.live.app import Service, make_app
    from flows.live.stream import Watcher
    from hlatctl.report.live.index import LiveIndex

    sys.setswitchinterval(_SWITCH_S)
    watcher = Watcher(LiveIndex(runs_dir))
    service = Service(watcher, _states(behind), options.allow_control)
    app = make_app(service, token=token, port=int(listener.getsockname()[1]))
    with _serving(app, listener, watcher):
        assert service.answers, "imported now, so that the first request about a run doesn't wait for it"
        while not stopped.wait(_LOOK_S):
            for text in behind.look() if behind else ():
                say(text)
                watcher.tell()


def _states(behind: ui.Servers | None) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the servers' states, with the user and password of those that are up."""

    def states() -> dict[str, Any]:
        found = behind.states() if behind else dict.fromkeys(ui.NAMES, ui.OFF)
        return {
            name: {**state, "auth": behind.auth if behind and state["url"] else None} for name, state in found.items()
        }

    return states


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    handler, logger = logging.FileHandler(path, "w", encoding="utf-8"), logging.getLogger("uvicorn")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
        handler.close()


@contextmanager
def _serving(app: Any, listener: socket.socket, watcher: Watcher) -> Iterator[None]:
    """Answer requests in a separate thread, because the main thread handles signals."""
    import uvicorn

    from flows.tracking.connections import BACKLOG, Connection, Server

    # Open event streams end with the page: don't wait for them.
    settings = uvicorn.Config(
        app,
        http=Connection,
        backlog=BACKLOG,
        log_config=None,
        log_level="error",
        lifespan="off",
        timeout_graceful_shutdown=0,
        ws="none",
    )
    server = Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="page", daemon=True)
    watcher.start()
    thread.start()
    try:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline_s:
                raise LaunchError("the page's server does not start", hint="retry, or choose another --port")
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join()
        watcher.stop()
