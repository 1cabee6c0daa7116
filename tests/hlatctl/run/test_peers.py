"""Only processes of the same user stay connected, and ports close for others once a group exists."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from hlatctl.run import peers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and filters as Linux does")


def test_ports_that_open_in_the_block_take_no_more_connections_and_keep_those_that_they_have() -> None:
    older = socket.create_server(("127.0.0.1", 0))
    with peers.connecting("gloo"):
        newer = socket.create_server(("127.0.0.1", 0))
        known = socket.create_connection(newer.getsockname())
        accepted, _ = newer.accept()
    with older, newer, known, accepted:
        assert _connects(older.getsockname()[1])
        assert not _connects(newer.getsockname()[1])
        known.sendall(b"x")
        assert accepted.recv(1) == b"x"


@pytest.mark.parametrize(("backend", "lazy"), [("nccl", "0"), ("gloo", "1")])
def test_ports_of_groups_that_connect_later_stay_open(backend: str, lazy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazy)
    with peers.connecting(backend):
        newer = socket.create_server(("127.0.0.1", 0))
    with newer:
        assert _connects(newer.getsockname()[1])


def _connects(port: int) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(0.1)
        try:
            stranger.connect(("127.0.0.1", port))
        except TimeoutError:  # the kernel drops it
            return False
    return True


@pytest.mark.processes
def test_own_connections_are_waited_for_and_a_closed_one_is_an_error() -> None:
    code = """
import socket, time
from hlatctl.run.peers import refuse_strangers
listener = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(listener.getsockname())
accepted = []
time.sleep = lambda _: accepted.append(listener.accept())
refuse_strangers()
assert len(accepted) == 1, "the connection has no owner at its other end until it is accepted"
refuse_strangers()
ours.close()
try:
    refuse_strangers(timeout_s=0)
except ConnectionError as error:
    print(error)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "the other end of a connection is closed, or on another machine\n"
