"""Serves on loopback, and limits the connections: every user of the machine can open some before any password check.

A server gets its password from its environment (``local_server.AUTH_ENV``), which other users can't read. It listens on
a socket that its parent has bound, so that no other process can take the port, and ends with its parent.

Each connection needs an open file, and a process has a limited number of them. So a connection without a request is
closed after a while. If there are too many, the oldest ones that have sent no request with the password or token are
closed first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flows.tracking.local_server import AUTH_ENV, App, is_allowed
from hlatctl.run.errors import ConfigError

#: A connection is closed if it has sent no complete request for this long; an answer may take as long as it needs.
SILENT_S = 10.0
#: A page has at most six connections.
MOST_CONNECTIONS = 400
#: Connections that are accepted simultaneously, before any of them can be closed.
BACKLOG = 100
#: Connections that wait to be accepted. A full queue drops more, and a browser tries again after 1 s, 3 s and 7 s: the
#: owner's must find room beside a stranger's 400. In a longer queue it waits behind more that a stranger has closed.
_QUEUE = 512


class Connection(H11Protocol):
    """A connection that is closed if it sends no request, or to make room for others if it was never allowed."""

    _last_request: Any = None
    _timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a new connection."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(SILENT_S, self._look)
        self._made_s = self.loop.time()
        self._was_allowed = False
        known = [one for one in self.connections if isinstance(one, Connection) and not one._is_gone]
        if len(known) > MOST_CONNECTIONS:
            min((one for one in known if not one._belongs_to_owner), key=lambda one: one._made_s).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def _is_gone(self) -> bool:
        """Whether it needs no open file any more, or only for a moment."""
        return self.transport.is_closing() and not self.transport.get_write_buffer_size()

    @property
    def _belongs_to_owner(self) -> bool:
        # A new connection has no scope, and a new request is not allowed before the app has seen it.
        self._was_allowed = self._was_allowed or (self.scope is not None and is_allowed(self.scope))
        return self._was_allowed

    def _look(self) -> None:
        request, unread_bytes = self.cycle, self.transport.get_write_buffer_size()
        if self.transport.is_closing():
            if unread_bytes >= self._unread_bytes > 0:  # its client reads nothing
                self.transport.abort()
                return
        elif request is self._last_request and (request is None or request.response_complete):
            self.transport.close()
        self._last_request, self._unread_bytes = request, unread_bytes
        self._timer = self.loop.call_later(SILENT_S, self._look)


class Server(uvicorn.Server):
    """A server with a long queue of connections to accept."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then make the queue longer than the number that is accepted simultaneously."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_QUEUE)


def take_auth() -> str:
    """Remove ``USER:PASSWORD`` from the environment, so that child processes don't get it, and return it.

    Raises:
        ConfigError: the variable is not set.
    """
    auth = os.environ.pop(AUTH_ENV, "")
    if not auth.partition(":")[2]:
        raise ConfigError(f"{AUTH_ENV}: is not set; servers need a password", hint="start it with `hlatctl ui`")
    return auth


def inherited(fd: int) -> tuple[socket.socket, int]:
    """Return the listening socket of a descriptor, and its port."""
    listener = socket.socket(fileno=fd)
    return listener, int(listener.getsockname()[1])


def run(app: App, listener: socket.socket) -> int:
    """Serve until SIGTERM, or until the parent ends and so closes standard input; return the exit code."""
    # Don't wait for open connections: their clients are gone, or know that their events are stored.
    settings = uvicorn.Config(
        app, http=Connection, backlog=BACKLOG, log_level="error", lifespan="on", timeout_graceful_shutdown=0
    )
    server = Server(settings)

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        # Prefect's background services stop immediately for a signal; with `should_exit` they take seconds.
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    server.run(sockets=[listener])
    return 0 if server.started else 1
