"""Batches from the process that reads them to the other processes of its replica on its node, over Unix sockets.

The sockets are in the job's private folder, so no other user can connect. A message is a header, then the tokens or an
error as JSON. A lost process ends its connection: the others get an error then, and wait for nothing.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from hlatctl.run.errors import HlatctlError, LaunchError, from_record, to_record
from trainer.data.encoder import Tokens
from trainer.data.prefetch import STOP_POLL_S, Batch, Batches

#: A batch's number, or `_ERROR`, and the length of the rest in bytes.
_HEADER = struct.Struct("<qq")
_ERROR = -1
_RETRY_S = 0.05
#: A socket's longest path on every system: `sun_path` has 104 bytes on macOS and 108 on Linux, with a zero at the end.
_PATH_BYTES = 103


class Sender:
    """Sends batches to other processes, from one thread.

    Args:
        path: of the socket; an old one there is removed.
        receivers: how many processes will connect. The socket's name is removed once all have.
    """

    def __init__(self, path: Path, receivers: int) -> None:
        self._path, self._receivers, address = path, receivers, _address(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(STOP_POLL_S)
        path.unlink(missing_ok=True)
        self._listener.bind(address)
        self._listener.listen(receivers)
        self._connections: list[socket.socket] = []
        self._stopping = threading.Event()

    def send(self, batch: Batch) -> None:
        """Send a batch to all receivers that still want batches; wait until the slowest has room for it."""
        self._send(batch.number, np.ascontiguousarray(batch.tokens).tobytes())

    def fail(self, error: HlatctlError) -> None:
        """Send an error, which the receivers raise instead of the next batch."""
        self._send(_ERROR, json.dumps(to_record(error)).encode())

    def stop(self) -> None:
        """Make a :meth:`send` of another thread return."""
        self._stopping.set()
        for connection in self._connections:
            with suppress(OSError):  # the receiver is gone
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections, after the thread that sends has ended."""
        self.stop()
        for end in (self._listener, *self._connections):
            end.close()
        self._path.unlink(missing_ok=True)

    def _send(self, number: int, content: bytes) -> None:
        self._accept()
        message = _HEADER.pack(number, len(content)) + content
        for connection in self._connections:
            if self._stopping.is_set():
                return
            with suppress(OSError):  # a receiver that has closed has all that it needs, or has failed
                connection.sendall(message)

    def _accept(self) -> None:
        """Wait until all receivers have connected."""
        while len(self._connections) < self._receivers and not self._stopping.is_set():
            with suppress(TimeoutError):
                connection, _ = self._listener.accept()
                connection.setblocking(True)
                self._connections.append(connection)
                if len(self._connections) == self._receivers:
                    self._path.unlink(missing_ok=True)


class ReceivedBatches(Batches):
    """The batches that another process of this node reads and sends.

    Args:
        path: of the sender's socket; it may appear later.
        shape: (sequences, seq_len + 1) of the tokens.
        ahead: how many batches to receive before they are needed.
    """

    def __init__(self, path: Path, shape: tuple[int, int], *, ahead: int) -> None:
        super().__init__(batch=0, ahead=ahead)
        self._address, self._shape = _address(path), shape
        self._connection = socket.socket(socket.AF_UNIX)
        self._start(self._produce)

    def close(self) -> None:
        """Stop the background thread, which may be waiting for a batch."""
        self._stopping.set()
        with suppress(OSError):  # not connected
            self._connection.shutdown(socket.SHUT_RDWR)
        super().close()
        self._connection.close()

    def _produce(self) -> None:
        self._connect()
        while not self._stopping.is_set():
            self._put(self._receive())

    def _connect(self) -> None:
        while not self._stopping.is_set():
            try:
                return self._connection.connect(self._address)
            except (FileNotFoundError, ConnectionRefusedError):  # the sender has not started, or an earlier one died
                time.sleep(_RETRY_S)

    def _receive(self) -> Batch:
        number, size = _HEADER.unpack(self._read(_HEADER.size))
        content = self._read(size)
        if number == _ERROR:
            raise from_record(json.loads(content))
        tokens: Tokens = np.frombuffer(content, dtype=np.int32).reshape(self._shape)
        return Batch(tokens, number)

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                # Recovery knows by the first words that another process has failed before (flows.recovery).
                raise ConnectionError("Connection closed by peer: the process that reads this replica's data has ended")
            view = view[count:]
        return content


def _address(path: Path) -> str:
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise LaunchError(
            f"{path}: a socket's path has at most {_PATH_BYTES} bytes, this one has {len(os.fsencode(path))}",
            hint="set TMPDIR to a folder with a shorter path on every node, such as /tmp",
        )
    return os.fspath(path)
