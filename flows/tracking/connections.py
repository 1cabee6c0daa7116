"""Limits the connections to a server on loopback: every user of the machine can open some before any password check.

Each connection needs an open file, and a process has a limited number of them. So a connection without a request is
closed after a while. If there are too many, the oldest ones that have sent no request with the password or token are
closed first.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from flows.tracking.local_server import is_allowed

#: A connection is closed if it has sent no complete request for this long; an answer may take as long as it needs.
SILENT_S = 10.0
#: A page has at most six connections.
MOST_CONNECTIONS = 400
#: Connections that are accepted simultaneously, before any of them can be closed.
BACKLOG = 100


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
