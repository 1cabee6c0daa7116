"""A web server on loopback that answers its own user only: Prefect's and MLflow's, for `hlatctl ui` and for one flow.

Every user of a machine reaches its loopback, and so does any web page that one of them opens. So there is a password,
which the server finds in its environment (:data:`AUTH_ENV`; other users can't read it there), and requests for another
host name (DNS rebinding) or from another page (cross-site requests) are refused. The server listens on a socket that
its parent has bound, so no one else can take the port in between, and ends with its parent.
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from hlatctl.run.errors import ConfigError

HOST = "127.0.0.1"
USER = "hlatctl"
#: ``USER:PASSWORD`` that a server asks for.
AUTH_ENV = "HLATCTL_SERVER_AUTH"

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


def new_auth() -> str:
    """A user name and a new password: ``hlatctl:PASSWORD``."""
    return f"{USER}:{secrets.token_urlsafe(18)}"


def basic(auth: str) -> str:
    """The value of an ``Authorization`` header for a user name and a password."""
    return f"Basic {base64.b64encode(auth.encode()).decode()}"


def get(url: str, auth: str = "", timeout_s: float = 1.0) -> bytes:
    """What a server on loopback answers, whatever proxy is configured.

    Raises:
        OSError: it does not answer, or refuses.
    """
    request = urllib.request.Request(url, headers={"Authorization": basic(auth)} if auth else {})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as response:
        return bytes(response.read())


def own_hosts(port: int) -> tuple[str, ...]:
    """The host names that a server on this port answers to."""
    return f"{HOST}:{port}", f"localhost:{port}"


def own_origins(port: int) -> tuple[str, ...]:
    """The pages that may send requests to a server on this port: its own."""
    return tuple(f"http://{host}" for host in own_hosts(port))


class Gate:
    """Passes on what is asked of us by name, by our own pages or by no page, with the password.

    Args:
        app: what answers then.
        port: that it is served on.
        auth: ``USER:PASSWORD``; none: the app asks for it itself.
        health: a path that needs no password.
    """

    def __init__(self, app: App, port: int, auth: str | None = None, health: str = "") -> None:
        self._app, self._health = app, health
        self._hosts = {host.encode() for host in own_hosts(port)}
        self._origins = {origin.encode() for origin in own_origins(port)}
        self._authorization = basic(auth).encode() if auth else None

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Answer, or pass on."""
        status = self._refusal(scope) if scope["type"] in ("http", "websocket") else 0
        if not status:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            if status == 401:
                headers.append((b"www-authenticate", f'Basic realm="{USER}"'.encode()))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": _REASONS[status]})

    def _refusal(self, scope: _Scope) -> int:
        """An HTTP status; 0 if there is no objection."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts, origins = headers.get(b"host", []), headers.get(b"origin", [])
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts or not self._origins.issuperset(origins):
            return 403
        if self._authorization is None or scope["path"] == self._health:
            return 0
        given = headers.get(b"authorization", [b""])
        return 0 if len(given) == 1 and hmac.compare_digest(given[0], self._authorization) else 401


_REASONS = {
    401: b"A user name and password are needed; `hlatctl ui` has printed them.\n",
    403: b"This server answers only to its own address and its own pages.\n",
}


def take_auth() -> str:
    """The user name and password that this server process has to ask for; its children don't get them.

    Raises:
        ConfigError: there is none, and nothing here is served without.
    """
    auth = os.environ.pop(AUTH_ENV, "")
    if not auth.partition(":")[2]:
        raise ConfigError(
            f"{AUTH_ENV}: is not set, and nothing is served without a password", hint="start it with `hlatctl ui`"
        )
    return auth


def inherited(fd: int) -> tuple[socket.socket, int]:
    """The listening socket of that descriptor, and its port."""
    listener = socket.socket(fileno=fd)
    return listener, int(listener.getsockname()[1])


def run(app: App, listener: socket.socket) -> int:
    """Serve until standard input closes, which it does with the parent, or until SIGTERM; the exit code."""
    import uvicorn

    # Connections are not waited for: whoever held them is gone, or has already been told that its events are stored.
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=0))

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        # Prefect's background services stop at once for a signal, and take seconds for `should_exit`.
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    server.run(sockets=[listener])
    return 0 if server.started else 1
