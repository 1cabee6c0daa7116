"""Chooses a flow's Prefect API and sets Prefect's settings: no telemetry, no console logs, no pickles.

``configure`` must be called before prefect is imported. It needs no network: without the user's server or `hlatctl ui`,
it starts an API for this runs folder alongside the flow.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.runtime import programs
from flows.tracking import local_server, ui_record
from hlatctl.run.redact import hide

#: The id of the task run that represents this process's run in a sweep's flow run.
PARENT_ENV = "HLATCTL_PREFECT_PARENT"
_API_URL = "PREFECT_API_URL"
_API_AUTH = "PREFECT_API_AUTH_STRING"
#: On a busy machine, importing Prefect takes minutes.
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 5.0
#: The user's API is used for the whole run, and a busy one answers late. One that is gone refuses immediately.
_NAMED_TIMEOUT_S = 15.0

#: Defaults; variables that the user has set take precedence.
_DEFAULTS = {
    # No telemetry: Prefect's server and its client have separate switches.
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    # The command line shows progress and errors; Prefect's API still gets every line.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # The default is pickle, which is never loaded here. Results are in the journal.
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    # Prefect's default of 5 retries takes three minutes if the API disappears during a run.
    "PREFECT_CLIENT_MAX_RETRIES": "1",
}

_own_server: subprocess.Popen[bytes] | None = None


def settings(runs_dir: Path) -> dict[str, str]:
    """Return Prefect's settings for a runs folder as environment variables; the user's values take precedence."""
    values = _DEFAULTS | {"PREFECT_HOME": str(home(runs_dir))}
    return {name: os.environ.get(name, value) for name, value in values.items()}


def home(runs_dir: Path) -> Path:
    """Return the folder of Prefect's database for a runs folder, unless the user sets ``PREFECT_HOME``."""
    return runs_dir.absolute() / ".prefect"


def configure(runs_dir: Path, say: Callable[[str], None] | None = None, *, start: bool = True) -> bool:
    """Make Prefect report to an API that answers: the user's, else that of `hlatctl ui`, else one of this process.

    Args:
        runs_dir: runs folder; its ``.prefect`` folder contains the database of the latter two.
        say: called if the user's API doesn't answer (default: print to stderr), and while waiting for another.
        start: start an API if none is running.

    Returns:
        Whether there is an API.

    Raises:
        prefect.exceptions.PrefectException: no API could be started; a flow can still run without Prefect.
    """
    if not begin(runs_dir, say, start=start):
        return False
    connect(say)
    return True


def is_named() -> bool:
    """Return whether the user names an API."""
    return bool(os.environ.get(_API_URL)) and _own_server is None


def connect(say: Callable[[str], None] | None = None) -> None:
    """Do the part of ``configure`` that waits for the API, and import Prefect."""
    _wait_for_own(say)
    _drop_events_soon()


def begin(runs_dir: Path, say: Callable[[str], None] | None = None, *, start: bool = True) -> bool:
    """Do the part of ``configure`` that doesn't wait. The API starts while the caller continues."""
    if _own_server is not None and _own_server.poll() is None:
        return True
    named = os.environ.get(_API_URL, "")
    ui = ui_record.read(runs_dir)
    # The sweep of a trial has started it, and perhaps just now.
    patience_s = _START_TIMEOUT_S if PARENT_ENV in os.environ else _NAMED_TIMEOUT_S
    if named and not answers(named, patience_s):
        instead = "starting one beside this flow" if start else "continuing without Prefect"
        (say or _to_stderr)(f"{_API_URL}={hide(named)} does not answer; {instead}")
        named = ""
        del os.environ[_API_URL]
    if named:
        _use_settings(runs_dir)
    elif ui and ui.prefect and answers(f"{ui.prefect}/api"):
        _use_settings(runs_dir)
        _use(f"{ui.prefect}/api", ui.auth)
    elif start:
        _use_settings(runs_dir)
        _start_own()
    else:
        return False
    return True


def is_up() -> bool:
    """Return whether the API that :func:`begin` has chosen answers now."""
    return _API_URL in os.environ and answers(os.environ[_API_URL])


def _use(api_url: str, auth: str) -> None:
    os.environ[_API_URL], os.environ[_API_AUTH] = api_url, auth


def answers(api_url: str, timeout_s: float = 1.0) -> bool:
    """Return whether an HTTP server answers, even with an error: Prefect handles a wrong password."""
    try:
        with urllib.request.urlopen(f"{api_url.rstrip('/')}/health", timeout=timeout_s):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


def stop() -> None:
    """Stop the API that ``configure`` started, if any. This also happens when this process ends."""
    global _own_server
    server, _own_server = _own_server, None
    if server is None:
        return
    if server.stdin:
        server.stdin.close()
    try:
        server.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def is_prefects(error: BaseException) -> bool:
    """Return whether an error comes from Prefect or the connection to it, and not from a stage."""
    return type(error).__module__.split(".")[0] in ("prefect", "httpx", "httpcore", "anyio", "sqlalchemy", "websockets")


@contextmanager
def tolerated(on_lost: Callable[[str], None]) -> Iterator[None]:
    """Call a function with the text of a Prefect error instead of raising the error."""
    try:
        yield
    except Exception as error:
        if not is_prefects(error):
            raise
        on_lost(f"{type(error).__name__}: {error}")


def _use_settings(runs_dir: Path) -> None:
    os.environ.update(settings(runs_dir))
    # Prefect's client uses http_proxy, and no proxy can reach this machine's loopback.
    unproxied = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if "127.0.0.1" not in unproxied.split(","):
        os.environ["no_proxy"] = f"{unproxied},127.0.0.1".lstrip(",")
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)


def _start_own() -> None:
    """Start the API. Requests wait in its socket's queue until it is up."""
    global _own_server
    with socket.create_server(("127.0.0.1", 0)) as listener, _server_log().open("ab") as log:
        port, auth = listener.getsockname()[1], local_server.new_auth()
        _use(f"http://127.0.0.1:{port}/api", auth)
        _own_server = programs.start_alongside(
            programs.python_command("flows.tracking.servers", "prefect", str(listener.fileno())),
            log,
            stdin=subprocess.PIPE,
            env={**os.environ, local_server.AUTH_ENV: auth},
            pass_fds=[listener.fileno()],
        )
    atexit.register(stop)


def _wait_for_own(say: Callable[[str], None] | None) -> None:
    wait = local_server.Wait(say or (lambda text: None))
    while _own_server is not None and _own_server.poll() is None:
        if answers(os.environ[_API_URL]):
            return
        if wait.so_far_s("Prefect's API") > _START_TIMEOUT_S:
            break
    if _own_server is not None:
        os.environ.pop(_API_URL, None)
        os.environ.pop(_API_AUTH, None)
        stop()
        from prefect.exceptions import PrefectException

        raise PrefectException(f"Prefect's API does not start; see {_server_log()}")


def _drop_events_soon() -> None:
    """Drop events when the API has disappeared. Prefect would retry each of them for 7 s, at exit too."""
    import logging

    from prefect.events.clients import PrefectEventsClient
    from prefect.events.worker import EventsWorker

    if "prefect.cloud" not in os.environ[_API_URL]:
        EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=2)
    # Prefect checks this switch before it reports lost log lines on stderr.
    logging.raiseExceptions = False


def _server_log() -> Path:
    return Path(os.environ["PREFECT_HOME"]) / "server.log"


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
