"""Connections of strangers end, after a while or when there are too many, and the owner is answered all the same."""

from __future__ import annotations

import http.client
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from flows.tracking import connections
from flows.tracking.local_server import Gate, basic
from tests.waiting import WAIT_S, wait_for

Connect = Callable[[], socket.socket]
_AUTH = "hlatctl:secret"


@pytest.fixture
def answer() -> threading.Event:
    return threading.Event()


@pytest.fixture
def asked() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def connect(answer: threading.Event, asked: threading.Semaphore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Connects to a server whose answers wait for an event."""
    monkeypatch.setattr(connections, "SILENT_S", 0.1)
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 3)

    def handler(_request: Request) -> PlainTextResponse:
        asked.release()
        answer.wait(WAIT_S)
        return PlainTextResponse("answered")

    def much(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("much " * (4 << 20))

    listener = socket.create_server(("127.0.0.1", 0))

    async def busy(_request: Request) -> PlainTextResponse:
        asked.release()
        answer.wait(WAIT_S)  # nothing else is accepted or answered meanwhile
        return PlainTextResponse("busy")

    app = Starlette(routes=[Route("/", handler), Route("/much", much), Route("/busy", busy)])
    gate = Gate(app, listener.getsockname()[1], _AUTH, app_checks=True)
    settings = uvicorn.Config(gate, http=connections.Connection, backlog=10, log_config=None, lifespan="off", ws="none")
    server = connections.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    opened: list[socket.socket] = []

    def connected() -> socket.socket:
        opened.append(socket.create_connection(listener.getsockname(), timeout=WAIT_S))
        return opened[-1]

    try:
        assert wait_for(lambda: server.started)
        yield connected
    finally:
        answer.set()
        server.should_exit = True
        for each in opened:
            each.close()
        thread.join()
        listener.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x"])
def test_a_connection_without_a_whole_request_is_closed(connect: Connect, sent: bytes) -> None:
    silent = connect()
    silent.sendall(sent)
    assert silent.recv(1) == b""


def _ask(connection: socket.socket, path: str = "/", *, owner: bool = False) -> None:
    port = connection.getpeername()[1]
    password = f"Authorization: {basic(_AUTH)}\r\n" if owner else ""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{password}\r\n".encode())


def _ended(connection: socket.socket) -> bool:
    """Wait until the server has closed a connection."""
    with suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def _asking(connect: Connect, asked: threading.Semaphore) -> socket.socket:
    """Return a connection whose request has arrived; on a busy machine, the first one may have been silent too long."""
    while True:
        asking = connect()
        with suppress(OSError):
            _ask(asking, owner=True)
        while not asked.acquire(timeout=0.05):
            if select.select([asking], [], [], 0)[0]:  # closed
                break
        else:
            return asking


def test_an_answer_may_take_longer_and_the_connection_ends_after_it(
    connect: Connect, answer: threading.Event, asked: threading.Semaphore
) -> None:
    asking = _asking(connect, asked)
    assert connect().recv(1) == b""  # this one has been silent for too long
    assert connect().recv(1) == b""
    answer.set()
    found = http.client.HTTPResponse(asking)
    found.begin()
    assert found.read() == b"answered"
    assert asking.recv(1) == b""


def test_the_oldest_silent_connection_makes_room_for_a_request(
    connect: Connect, answer: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_S", WAIT_S)
    answer.set()
    silent = [connect() for _ in range(3)]
    asking = connect()
    _ask(asking)
    assert asking.recv(12) == b"HTTP/1.1 200"
    assert _ended(silent[0])
    _ask(silent[1])
    assert silent[1].recv(12) == b"HTTP/1.1 200"


def test_a_connection_without_the_password_ends_with_its_answer(connect: Connect, answer: threading.Event) -> None:
    answer.set()
    asking = connect()
    _ask(asking)
    found = http.client.HTTPResponse(asking)
    found.begin()
    assert (found.read(), found.headers["connection"]) == (b"answered", "close")
    assert asking.recv(1) == b""


def test_connections_that_asked_without_the_password_make_room_for_the_owner_whose_own_stay(
    connect: Connect, answer: threading.Event, asked: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_S", WAIT_S)
    owner = connect()
    _ask(owner, owner=True)
    assert asked.acquire(timeout=WAIT_S)
    strangers = [connect() for _ in range(2)]
    for each in strangers:
        _ask(each)
        assert asked.acquire(timeout=WAIT_S)
    connect()
    another = connect()
    _ask(another, owner=True)
    assert asked.acquire(timeout=WAIT_S)
    assert _ended(strangers[0])
    assert _ended(strangers[1])
    answer.set()
    assert [each.recv(12) for each in (owner, another)] == [b"HTTP/1.1 200"] * 2


def test_a_connection_is_refused_if_all_are_the_owners(
    connect: Connect, answer: threading.Event, asked: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_S", WAIT_S)
    own = [connect() for _ in range(3)]
    for each in own:
        _ask(each, owner=True)
        assert asked.acquire(timeout=WAIT_S)
    assert _ended(connect())
    answer.set()
    assert [each.recv(12) for each in own] == [b"HTTP/1.1 200"] * 3


def test_a_client_that_does_not_read_its_answer_makes_room_too(
    connect: Connect, answer: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_S", WAIT_S)
    answer.set()
    slow = [connect() for _ in range(3)]
    for each in slow:
        _ask(each, "/much")
        assert each.recv(12) == b"HTTP/1.1 200"
    asking = connect()
    _ask(asking, owner=True)
    assert asking.recv(12) == b"HTTP/1.1 200"
    assert _ended(slow[0])


def test_the_owners_connection_finds_room_among_400_that_wait_to_be_accepted(
    connect: Connect, answer: threading.Event, asked: threading.Semaphore
) -> None:
    _ask(busy := connect(), "/busy", owner=True)
    assert asked.acquire(timeout=WAIT_S)
    strangers = [connect() for _ in range(400)]  # each one waits for seconds if the queue is full
    owner = connect()
    _ask(owner, owner=True)
    answer.set()
    assert [each.recv(12) for each in (busy, owner)] == [b"HTTP/1.1 200"] * 2
    assert all(map(_ended, strangers[:-3]))


def test_an_answer_of_which_nothing_more_is_read_ends(
    connect: Connect, answer: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, forget = threading.Event(), connections.Connection.connection_lost

    def note(connection: connections.Connection, exc: Exception | None) -> None:
        forget(connection, exc)
        lost.set()

    monkeypatch.setattr(connections.Connection, "connection_lost", note)
    answer.set()
    slow = connect()
    _ask(slow, "/much")
    assert slow.recv(12) == b"HTTP/1.1 200"
    assert lost.wait(WAIT_S)
