"""A web server on loopback that answers only its own user: Prefect's and MLflow's, for `hlatctl ui` and for one flow.

Every user of a machine can reach its loopback, and so can any web page that they open. So requests need a password, and
requests for another host name (DNS rebinding) or from another page (cross-site requests) are refused. ``connections``
serves.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

HOST = "127.0.0.1"
USER = "hlatctl"
#: ``USER:PASSWORD`` that a server requires.
AUTH_ENV = "HLATCTL_SERVER_AUTH"
_SAY_EVERY_S = 15.0
_SAY_FIRST_S = 2.0
#: Set in the scope of a request that had the password or token.
_ALLOWED = "hlatctl.allowed"

#: Pages of Prefect and MLflow ask nobody else: Prefect's sends its use to a service for statistics.
_POLICY = (
    b"content-security-policy",
    b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'",
)

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


def new_auth() -> str:
    """Return a user name and a new password: ``hlatctl:PASSWORD``."""
    return f"{USER}:{secrets.token_urlsafe(18)}"


def basic(auth: str) -> str:
    """Return the ``Authorization`` header for ``USER:PASSWORD``."""
    return f"Basic {base64.b64encode(auth.encode()).decode()}"


#: Path of a page that logs this browser in to Prefect's pages, and goes on to the page after the password.
_LOGIN = "/hlatctl"
_LOGIN_PAGE = b"""<!doctype html><meta charset="utf-8"><title>hlatctl</title><script>
const [password, ...page] = location.hash.slice(1).split("/");
localStorage.setItem("prefect-password", decodeURIComponent(password));
location.replace(location.origin + "/" + page.join("/"));
</script>"""


def login_page(auth: str) -> str:
    """Return the path that logs a browser in to Prefect's pages. The path of one of them may follow.

    Without a log-in, Prefect shows a flow run as "page not found". The password is in the fragment, which browsers send
    to no server.
    """
    return f"{_LOGIN}#{urllib.parse.quote(basic(auth).removeprefix('Basic '), safe='')}"


def get(url: str, auth: str = "", timeout_s: float = 1.0) -> bytes:
    """Return the answer of a server on loopback; proxies are not used.

    Raises:
        OSError: the server doesn't answer, or answers with an error.
    """
    request = urllib.request.Request(url, headers={"Authorization": basic(auth)} if auth else {})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as response:
        return bytes(response.read())


def own_hosts(port: int) -> tuple[str, ...]:
    """Return the host names that a server on this port answers to."""
    return f"{HOST}:{port}", f"localhost:{port}"


def own_origins(port: int) -> tuple[str, ...]:
    """Return the origins that may send requests to a server on this port: its own pages."""
    return tuple(f"http://{host}" for host in own_hosts(port))


class Wait:
    """Reports after 2 s, and then every 15 s, which server is waited for.

    Args:
        say: called with the message.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began_s = time.monotonic()
        self._said_s: float | None = None

    def so_far_s(self, what: str) -> float:
        """Return the seconds waited so far."""
        now_s = time.monotonic()
        if self._said_s is None and now_s - self._began_s > _SAY_FIRST_S:
            self._said_s = now_s
            self._say(f"waiting for {what} to start")
        elif self._said_s is not None and now_s - self._said_s > _SAY_EVERY_S:
            self._said_s = now_s
            self._say(f"waiting for {what} to start, {now_s - self._began_s:.0f} s so far")
        return now_s - self._began_s


def allow(scope: MutableMapping[str, Any]) -> None:
    """Mark a request as having the password or token."""
    scope[_ALLOWED] = True


def is_allowed(scope: Mapping[str, object]) -> bool:
    """Return whether a request had the password or token."""
    return _ALLOWED in scope


class Gate:
    """Passes requests to an app if host name, origin and password are right.

    The connection of a request without the password is closed after the answer (``flows.tracking.connections``).

    Args:
        auth: ``USER:PASSWORD``; None: the app has another secret.
        health: a path that needs no password.
        app_checks: the app itself refuses requests without the password where it needs one.
    """

    def __init__(
        self, app: App, port: int, auth: str | None = None, health: str = "", *, app_checks: bool = False
    ) -> None:
        self._app, self._health, self._app_checks = app, health, app_checks
        self._hosts = {host.encode() for host in own_hosts(port)}
        self._origins = {origin.encode() for origin in own_origins(port)}
        self._authorization = basic(auth).encode() if auth else None

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass a request on, or refuse it."""
        status = self._refusal(scope) if scope["type"] in ("http", "websocket") else 0

        async def send_and_close(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if all(name.lower() != _POLICY[0] for name, _ in headers):
                    headers.append(_POLICY)
                if not is_allowed(scope):
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            await send(message)

        if not status and self._app_checks and scope["type"] == "http" and scope["path"] == _LOGIN:
            headers = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-store")]
            await send_and_close({"type": "http.response.start", "status": 200, "headers": headers})
            await send_and_close({"type": "http.response.body", "body": _LOGIN_PAGE})
        elif not status:
            await self._app(scope, receive, send_and_close)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            if status == 401:
                headers.append((b"www-authenticate", f'Basic realm="{USER}"'.encode()))
            await send_and_close({"type": "http.response.start", "status": status, "headers": headers})
            await send_and_close({"type": "http.response.body", "body": _REASONS[status]})

    def _refusal(self, scope: _Scope) -> int:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts, origins = headers.get(b"host", []), headers.get(b"origin", [])
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts or not self._origins.issuperset(origins):
            return 403
        if self._authorization is None:
            return 0
        given = headers.get(b"authorization", [b""])
        if len(given) == 1 and hmac.compare_digest(given[0], self._authorization):
            allow(scope)
            return 0
        return 0 if self._app_checks or scope["path"] == self._health else 401


_REASONS = {
    401: b"A user name and a password are required; `hlatctl ui` has printed them.\n",
    403: b"This server answers only to its own address and its own pages.\n",
}
