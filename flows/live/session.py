"""Decides who may use the page: this user, with the token of the link, and only from the page itself.

Every user of a machine can reach its loopback, so each request needs the token, in a cookie or a header. The token is
in a file that only this user can read, so links stay valid after a restart. ``flows.tracking.local_server.Gate`` checks
host and origin first.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flows.tracking.local_server import allow, own_origins
from hlatctl.run import files
from hlatctl.run.errors import cannot_write

HEALTH = "/health"
_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_NO_TOKEN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>hlatctl</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<main><h1>This page needs its link</h1>
<p>Open the link that <code>hlatctl ui</code> has printed. It ends with <code>?token=…</code>.</p>
<p>If it is no longer on the screen, run <code>hlatctl ui</code> again.</p></main>
"""


class Session:
    """Passes requests to an app if they have the token, and adds headers that restrict the page.

    Args:
        token: token that requests need.
        port: port of the server. A host's cookies are shared between ports, so the cookie's name contains it.
        allow_control: whether POST requests are allowed.
    """

    def __init__(self, app: ASGIApp, token: str, port: int, *, allow_control: bool) -> None:
        self._app, self._token, self._allow_control = app, token, allow_control
        self._cookie, self._origins = f"hlatctl-{port}", own_origins(port)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._answer(scope)
        is_api = scope["path"].startswith("/api/")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                # The page's files are requested again each time, so that an upgrade never mixes old and new ones.
                extra = {**_HEADERS, "cache-control": "no-store" if is_api or answer else "no-cache"}
                pairs = [(name.encode(), value.encode()) for name, value in extra.items()]
                message["headers"] = [*message["headers"], *(pair for pair in pairs if pair[0] not in given)]
            await send(message)

        await (answer or self._app)(scope, receive, send_with_headers)

    def _answer(self, scope: Scope) -> Response | None:
        """Return an answer in place of the app's; None if the app may answer."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and given and self._is_token(given):
            allow(scope)
            return self._logged_in()
        headers = Headers(scope=scope)
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(cookie) or self._is_token(bearer):
            allow(scope)
        elif scope["path"] != HEALTH:
            return HTMLResponse(_NO_TOKEN, 401)
        # A page on another port of this host is the same site: the browser sends it the cookie, and may send no origin.
        if scope["path"].startswith("/api/") and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return _refused("only the page itself can read this", "open the page's link")
        if scope["method"] in ("GET", "HEAD"):
            return None
        return self._control_refused(headers, cookie)

    def _control_refused(self, headers: Headers, cookie: str) -> Response | None:
        if headers.get("origin") not in self._origins or headers.get("x-hlatctl") != "1" or not self._is_token(cookie):
            return _refused("only the page itself can change something", "open the page's link and use its buttons")
        if not self._allow_control:
            return _refused("this page can't change runs", "start it with `hlatctl ui --allow-control`")
        return None

    def _logged_in(self) -> Response:
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return answer

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())


def _refused(error: str, hint: str) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": error, "hint": hint}, 403)


_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,100}")


def kept_token(folder: Path) -> str:
    """Return the token in ``<folder>/token``, and write a new one if there is none that only this user can read.

    Raises:
        StorageError: the file can't be written.
    """
    path = folder / "token"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, encoding="ascii") as file:
            status = os.fstat(descriptor)
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
            token = file.read(200).strip() if ours else ""
    except (OSError, ValueError):
        token = ""
    if _TOKEN.fullmatch(token):
        return token
    token = secrets.token_urlsafe(32)
    try:
        path.unlink(missing_ok=True)
        files.write_text(path, token + "\n", private=True)
    except OSError as error:
        raise cannot_write(path, error) from None
    return token
