"""Finds nodes that are cut off, by a power cut or a dead network, before the scheduler does. Standard library only.

Each node's program (``hlatctl.node``) holds a connection to the program that keeps the nodes (``hlatctl.allocation``).
Nothing is sent there: the kernels of both hosts ask each other every second whether the other one still answers. A
stopped or busy process does not matter, because its kernel answers for it. The connection also ends when the node's
program dies. So its end is only a suspicion, and the node's slurmd decides.

A node is cut if all of this holds for ``_CUT_S`` seconds:

- its connection has ended, or it has none although another node has;
- its slurmd refuses connections or does not answer, while the slurmd of another node, not this one, answers;
- training makes no step;
- enough other nodes are left for a restart. Otherwise the scheduler decides, because nothing would be gained.

If this program was held up meanwhile, the time counts from the beginning.

At 2,048 nodes: 2,048 connections, and 4,096 packets of 66 bytes per second (270 KB/s) at the first node. This program
only wakes up when one of them ends. Shared storage is only read while a node is suspected: one file per second.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

#: Environment variable of a round's jobs: host and port of the program that watches them, and a secret.
WATCH_ENV = "HLATCTL_WATCH"
#: Time after which a host's kernel has not answered: a question per second, the first one after a second.
_ASKS_EVERY_S, _QUESTIONS = 1, 3
#: How long all signs must agree; interval between two questions to slurmd, and the time for its answer.
_CUT_S, _PROBE_EVERY_S, _PROBE_S = 4.0, 1.0, 0.8
#: The interval doubles up to this while slurmd answers. A question that is so much later than due was held up.
_PROBE_SELDOM_S, _LATE_S = 30.0, 2.0
#: Time for the first node's program to connect, and then for the others.
_STARTS_S, _CONNECTS_S = 120.0, 10.0
#: Time for a connection to a host that may be gone.
_CONNECT_TIMEOUT_S = 2.0
#: What a node's program says when its job has ended there.
_ENDED = b"ended\n"
#: How many other hosts are asked for comparison.
_COMPARED = 3
#: Connections beyond one per node that may wait until they have shown that they know the secret; length of a line.
_STRANGERS, _LINE_BYTES = 64, 512

#: Where slurmd listens on some hosts; hosts that the scheduler doesn't know are left out.
Addresses = Callable[[Collection[str]], Mapping[str, tuple[str, int]]]


def _mac(secret: str, *words: str) -> str:
    return hmac.new(secret.encode(), " ".join(words).encode(), hashlib.sha256).hexdigest()


class Link:
    """A node's connection to the program that keeps the nodes; it can order this node to end the job.

    Each end shows by a keyed hash of both ends' random numbers that it knows the secret.
    """

    def __init__(self, connection: socket.socket, secret: str, host: str) -> None:
        self._connection, self._secret, self._host = connection, secret, host
        self._theirs, self._ours, self._text = "", secrets.token_hex(16), b""

    @classmethod
    def of_environment(cls, host: str) -> Self | None:
        """Connect as the environment says; None: there is nobody to connect to."""
        words = os.environ.get(WATCH_ENV, "").split()
        if len(words) != 3:
            return None
        try:
            connection = socket.create_connection((words[0], int(words[1])), timeout=_CONNECT_TIMEOUT_S)
        except (OSError, ValueError):
            return None
        connection.setblocking(False)
        return cls(connection, words[2], host)

    def ordered_end(self) -> bool:
        """Answer what has arrived; return whether it orders this node to end the job. Never waits."""
        with contextlib.suppress(OSError):
            self._text += self._connection.recv(_LINE_BYTES)
        while b"\n" in self._text:
            line, self._text = self._text.split(b"\n", 1)
            word = line.decode(errors="replace")
            if not self._theirs:
                self._theirs = word
                mac = _mac(self._secret, "node", word, self._ours, self._host)
                with contextlib.suppress(OSError):
                    self._connection.send(f"{self._host} {self._ours} {mac}\n".encode())
            elif hmac.compare_digest(word.encode(), _mac(self._secret, "end", self._theirs, self._ours).encode()):
                return True
        self._text = self._text[:_LINE_BYTES]
        return False

    def close(self) -> None:
        """Close the connection, and say that the job has ended here."""
        with contextlib.suppress(OSError):
            self._connection.send(_ENDED)
        self._connection.close()


@dataclass
class _Suspect:
    """What is known of a node whose connection has ended.

    Args:
        since_s: time of the first of the failed probes; None: the last one was answered.
        probes: number of failed probes.
        progress: what the file of training's progress looked like then.
    """

    since_s: float | None = None
    probes: int = 0
    progress: tuple[int, int] = (0, 0)


class Watch:
    """Watches the nodes of one round, from the first node of the allocation.

    Args:
        hosts: the round's nodes.
        spare: further nodes that can replace them.
        needed: number of nodes that a round needs.
        here: this node.
        progress: a file that changes with each step.
        addresses: where slurmd listens on hosts.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        spare: Sequence[str],
        needed: int,
        here: str,
        progress: Path,
        addresses: Addresses,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts, self._spare, self._needed, self._here = hosts, spare, needed, here
        self._progress, self._addresses, self._now_s = progress, addresses, now_s
        self._secret, self._selector = secrets.token_hex(16), selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._strangers: dict[socket.socket, str] = {}  # with the random numbers that they got
        self._nodes: dict[str, tuple[socket.socket, str]] = {}  # with what an order to end says
        self._suspects: dict[str, _Suspect] = {}
        self._known = dict[str, tuple[str, int]]()
        self._probed_s, self._probe_every_s = self._now_s(), _PROBE_EVERY_S
        self._listens_until_s = self._probed_s + _STARTS_S

    def __enter__(self) -> Self:
        if len(self._hosts) > 1:
            with contextlib.suppress(OSError):  # then nobody connects, and the scheduler finds what is cut
                self._listener = _listener()
                self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        self._listen_no_more()
        for connection, _text in self._nodes.values():
            connection.close()
        self._selector.close()

    @property
    def env(self) -> dict[str, str]:
        """The variables with which the nodes' programs connect."""
        if self._listener is None:
            return {}
        return {WATCH_ENV: f"{self._here} {self._listener.getsockname()[1]} {self._secret}"}

    def look(self, wait_s: float) -> list[str]:
        """Wait for what happens to the connections; return the nodes that are cut."""
        for key, _ in self._selector.select(wait_s):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                self._accept()
            elif connection in self._strangers:
                self._meet(connection)
            else:
                self._hear(connection, str(key.data))
        self._miss_absent()
        return self._cut()

    def order_end(self) -> None:
        """Order all nodes that answer to end the job."""
        for connection, text in self._nodes.values():
            with contextlib.suppress(OSError):
                connection.send(text.encode())

    @property
    def connected(self) -> int:
        """How many nodes are connected."""
        return len(self._nodes)

    def _accept(self) -> None:
        assert self._listener
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= len(self._hosts) + _STRANGERS:
            self._drop(next(iter(self._strangers)))
        connection.setblocking(False)
        self._strangers[connection] = secrets.token_hex(16)
        self._selector.register(connection, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            connection.send(f"{self._strangers[connection]}\n".encode())

    def _meet(self, connection: socket.socket) -> None:
        """Read what a stranger says, which is one short line, and drop it unless it knows the secret."""
        number = self._strangers[connection]
        try:
            host, theirs, mac = connection.recv(_LINE_BYTES).decode(errors="replace").split()
        except (OSError, ValueError):
            return self._drop(connection)
        if host not in self._hosts or not hmac.compare_digest(
            mac.encode(), _mac(self._secret, "node", number, theirs, host).encode()
        ):
            return self._drop(connection)
        del self._strangers[connection]
        for option, value in (
            (socket.TCP_KEEPIDLE, _ASKS_EVERY_S),
            (socket.TCP_KEEPINTVL, _ASKS_EVERY_S),
            (socket.TCP_KEEPCNT, _QUESTIONS),
            (socket.TCP_USER_TIMEOUT, 1000 * (_QUESTIONS + 1) * _ASKS_EVERY_S),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._selector.modify(connection, selectors.EVENT_READ, host)
        self._nodes[host] = connection, f"{_mac(self._secret, 'end', number, theirs)}\n"
        self._suspects.pop(host, None)
        if len(self._nodes) == 1:
            self._listens_until_s = self._now_s() + _CONNECTS_S
        if len(self._nodes) == len(self._hosts):
            self._listen_no_more()
        return None

    def _hear(self, connection: socket.socket, host: str) -> None:
        try:
            ended_by_itself = bool(connection.recv(_LINE_BYTES))
        except OSError:  # its host does not answer
            ended_by_itself = False
        self._selector.unregister(connection)
        connection.close()
        del self._nodes[host]
        if not ended_by_itself:
            self._suspect(host)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._strangers[connection]
        connection.close()

    def _listen_no_more(self) -> None:
        for connection in list(self._strangers):
            self._drop(connection)
        if self._listener:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _miss_absent(self) -> None:
        """Suspect the nodes that have not connected in time, although others have."""
        if self._listener and self._now_s() > self._listens_until_s:
            self._listen_no_more()
            for host in self._hosts if self._nodes else ():
                if host not in self._nodes:
                    self._suspect(host)

    def _suspect(self, host: str) -> None:
        if host != self._here:
            self._suspects.setdefault(host, _Suspect())
            self._probe_every_s = _PROBE_EVERY_S

    def _cut(self) -> list[str]:
        now_s = self._now_s()
        if not self._suspects or now_s - self._probed_s < self._probe_every_s:
            return []
        late, self._probed_s = now_s - self._probed_s > self._probe_every_s + _LATE_S, now_s
        others = [host for host in (*self._hosts, *self._spare) if host not in (*self._suspects, self._here)]
        if not others or len(self._hosts) + len(self._spare) - len(self._suspects) < self._needed:
            return []
        compared = others[:_COMPARED]
        asked = self._where([*self._suspects, *compared])
        answers = reachable(asked, _PROBE_S)
        late, progress = late or not answers.intersection(compared), _state_of(self._progress)
        for host, suspect in self._suspects.items():
            answered = host in answers or host not in asked
            if answered or late or progress != suspect.progress:
                suspect.since_s, suspect.probes, suspect.progress = None, 0, progress
            if not answered:
                suspect.since_s = now_s if suspect.since_s is None else suspect.since_s
                suspect.probes += 1
        silent = any(suspect.probes for suspect in self._suspects.values())
        self._probe_every_s = _PROBE_EVERY_S if silent else min(2 * self._probe_every_s, _PROBE_SELDOM_S)
        return [
            host
            for host, suspect in self._suspects.items()
            if suspect.since_s is not None and now_s - suspect.since_s >= _CUT_S and suspect.probes > 2
        ]

    def _where(self, hosts: Collection[str]) -> dict[str, tuple[str, int]]:
        if new := [host for host in hosts if host not in self._known]:
            self._known.update(self._addresses(new))
        return {host: self._known[host] for host in hosts if host in self._known}


def reachable(addresses: Mapping[str, tuple[str, int]], timeout_s: float) -> set[str]:
    """Return the hosts that accept a connection at their address within a time, all of them asked together."""
    found, waiting = set[str](), selectors.DefaultSelector()
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        stack.callback(waiting.close)
        for host, (address, port) in addresses.items():
            with contextlib.suppress(OSError):
                family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
                connection = stack.enter_context(socket.socket(family, kind))
                connection.setblocking(False)
                if (code := connection.connect_ex(where)) == 0:
                    found.add(host)
                elif code == errno.EINPROGRESS:
                    waiting.register(connection, selectors.EVENT_WRITE, host)
        # Also a process that was held up until the deadline looks once.
        while waiting.get_map() and (ready := waiting.select(max(0.0, deadline_s - time.monotonic()))):
            for key, _ in ready:
                asked = key.fileobj
                assert isinstance(asked, socket.socket)
                waiting.unregister(asked)
                if not asked.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found.add(str(key.data))
    return found


def _listener() -> socket.socket:
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _state_of(path: Path) -> tuple[int, int]:
    """Return the time and size of a file, as shared storage has it now: opening it asks NFS's server."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
