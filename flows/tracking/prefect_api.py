"""Which Prefect API a flow reports to, and Prefect's settings: no telemetry, no console logs, no pickles.

``configure`` has to be called before prefect is imported anywhere. It never needs a network: without a server that the
user names, and without `hlatctl ui`, it starts an API of this runs folder's own beside the flow.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from flows.runtime import spawn
from flows.tracking import local_server, ui_record
from hlatctl.run.redact import hide

_API_URL = "PREFECT_API_URL"
_API_AUTH = "PREFECT_API_AUTH_STRING"
#: A busy machine takes minutes to import Prefect.
_START_TIMEOUT_S = 300.0
_TELL_EVERY_S = 15.0
_STOP_TIMEOUT_S = 5.0

#: What a user has set in the environment stays as it is.
_DEFAULTS = {
    # Nothing leaves this machine: Prefect's server and its client each have their own switch.
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    # The command line shows progress and errors itself; Prefect's API still gets every line.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # The default is pickle, which is never loaded here. The journal holds what stages return.
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    # An API that goes away in the middle must not hold up the end of a run: 5 retries are three minutes.
    "PREFECT_CLIENT_MAX_RETRIES": "1",
}

_own_server: subprocess.Popen[bytes] | None = None


def settings(runs_dir: Path) -> dict[str, str]:
    """Prefect's settings for a runs folder, as environment variables; the user's own come first."""
    values = _DEFAULTS | {"PREFECT_HOME": str(home(runs_dir))}
    return {name: os.environ.get(name, value) for name, value in values.items()}


def home(runs_dir: Path) -> Path:
    """Where Prefect keeps the database of a runs folder, if the user has set no other place."""
    return runs_dir.absolute() / ".prefect"


def configure(runs_dir: Path, say: Callable[[str], None] | None = None) -> None:
    """Make Prefect report to an API that answers: the user's, else `hlatctl ui`'s, else one of this process's own.

    Args:
        runs_dir: its ``.prefect`` folder holds the database of the latter two.
        say: told when the user's API does not answer (stderr by default), and how long another is waited for.

    Raises:
        prefect.exceptions.PrefectException: no API could be started; a flow can still be run without Prefect.
    """
    begin(runs_dir, say)
    _wait_for_own(say)
    _give_up_on_events_soon()


def begin(runs_dir: Path, say: Callable[[str], None] | None = None) -> None:
    """The part of ``configure`` that does not wait: the API comes up while the caller does something else."""
    _use_settings(runs_dir)
    if _own_server is not None and _own_server.poll() is None:
        return
    named = os.environ.get(_API_URL)
    if named and answers(named):
        return
    if named:
        (say or _to_stderr)(f"{_API_URL}={hide(named)} does not answer; Prefect runs beside this flow instead")
    ui = ui_record.read(runs_dir)
    if ui and ui.prefect and answers(f"{ui.prefect}/api"):
        _use(f"{ui.prefect}/api", ui.auth)
        return
    _start_own()


def _use(api_url: str, auth: str) -> None:
    """Let this process, and those that it starts, report there."""
    os.environ[_API_URL], os.environ[_API_AUTH] = api_url, auth


def answers(api_url: str, timeout_s: float = 1.0) -> bool:
    """Whether something speaks HTTP there; a refusal to let us in is left to Prefect, which has the key."""
    try:
        with urllib.request.urlopen(f"{api_url.rstrip('/')}/health", timeout=timeout_s):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


def stop() -> None:
    """Stop the API that ``configure`` started, if it did; done by itself when this process ends."""
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
    """It comes from Prefect or from the connection to it, and not from a stage."""
    return type(error).__module__.split(".")[0] in ("prefect", "httpx", "httpcore", "anyio", "sqlalchemy", "websockets")


def _use_settings(runs_dir: Path) -> None:
    os.environ.update(settings(runs_dir))
    # Prefect's client honours http_proxy, and no proxy can reach our loopback.
    unproxied = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if "127.0.0.1" not in unproxied.split(","):
        os.environ["no_proxy"] = f"{unproxied},127.0.0.1".lstrip(",")
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)


def _start_own() -> None:
    """Start the API. Requests wait in its socket's queue until it is up, so nobody has to know when that is."""
    global _own_server
    with socket.create_server(("127.0.0.1", 0)) as listener, _server_log().open("ab") as log:
        port, auth = listener.getsockname()[1], local_server.new_auth()
        _use(f"http://127.0.0.1:{port}/api", auth)
        _own_server = spawn.beside(
            spawn.command("flows.tracking.prefect_server", str(listener.fileno())),
            log,
            stdin=subprocess.PIPE,
            env={**os.environ, local_server.AUTH_ENV: auth},
            pass_fds=[listener.fileno()],
        )
    atexit.register(stop)


def _wait_for_own(say: Callable[[str], None] | None) -> None:
    began_s = told_s = time.monotonic()
    while _own_server is not None and (now_s := time.monotonic()) - began_s < _START_TIMEOUT_S:
        if _own_server.poll() is not None:
            break
        if answers(os.environ[_API_URL]):
            return
        if say and now_s - told_s > _TELL_EVERY_S:
            told_s = now_s
            say(f"waiting for Prefect's API to start, {now_s - began_s:.0f} s so far")
    if _own_server is not None:
        os.environ.pop(_API_URL, None)
        os.environ.pop(_API_AUTH, None)
        stop()
        from prefect.exceptions import PrefectException

        raise PrefectException(f"Prefect's API does not start; its last words are in {_server_log()}")


def _give_up_on_events_soon() -> None:
    """Drop events that an API which went away can't take; Prefect would try each of them for 7 s, at exit too."""
    import logging

    from prefect.events.clients import PrefectEventsClient
    from prefect.events.worker import EventsWorker

    if "prefect.cloud" not in os.environ[_API_URL]:
        EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=2)
    # The standard library's switch for production; Prefect asks it before it complains on stderr about lost log lines.
    logging.raiseExceptions = False


def _server_log() -> Path:
    return Path(os.environ["PREFECT_HOME"]) / "server.log"


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
