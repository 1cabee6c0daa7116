"""The log of a node: the lines of all of its ranks, each with its rank's number. Standard library only.

One thread empties the ranks' pipes, another one writes the log. Neither waits for the other, so slow storage never
stops a rank, and a rank never fills the memory: a rank may print a burst of 16 MiB and 64 KiB per second after that.
Output beyond this limit is dropped, and so is output that finds the log's queue full (16 MiB). A line in the log says
how much was dropped. The last 64 KiB before the end of a gap and before a rank's end are always kept, because they
explain a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
import threading
import time
from collections import deque
from pathlib import Path

from hlatctl.run.rank_output import prefix

#: Bytes that a rank may print in a burst, and per second.
BURST_BYTES = 16 << 20
RATE_BYTES_PER_S = 64 << 10
#: Bytes kept of dropped output, and maximum length of a line; longer lines are broken.
TAIL_BYTES = 64 << 10
#: Maximum bytes waiting to be written to the log.
_QUEUE_BYTES = 16 << 20
_PIPE_BYTES = 1 << 20
#: An unfinished line (a prompt, a progress bar) is written after this time without output.
_IDLE_S = 2.0
#: Limit for processes that hang in a device driver with open pipes, and for storage that does not answer.
_CLOSE_S = 10.0


class RankLines:
    """Turns the output of one rank into lines of the log.

    Args:
        rank: global rank in the job.
        now_s: time of a monotonic clock.
    """

    def __init__(self, rank: int, now_s: float) -> None:
        self._prefix = prefix(rank)
        self._open = bytearray()
        self._refilled_s = now_s
        self._may = float(BURST_BYTES)
        self._left_out, self._tail = 0, b""

    def take(self, block: bytes, now_s: float, *, room: bool = True) -> bytes:
        """Return the lines for the log.

        Args:
            block: new output of the rank.
            now_s: current time of the clock.
            room: whether the log's queue has room.
        """
        self._may = min(BURST_BYTES, self._may + (now_s - self._refilled_s) * RATE_BYTES_PER_S)
        self._refilled_s = now_s
        # After a gap, room for several seconds comes first, or there would be a gap at every block.
        needed = len(block) + (BURST_BYTES // 16 if self._left_out else 0)
        if not room or self._may < needed:
            self._leave_out(block)
            return b""
        self._may -= len(block)
        return self._gap() + self._lines(block)

    def idle(self, now_s: float) -> bytes:
        """Return output that has waited for a while: an unfinished line, or the end of a gap."""
        if now_s - self._refilled_s < _IDLE_S:
            return b""
        return self.end()

    def end(self) -> bytes:
        """Return all remaining output; an unfinished last line gets a newline."""
        last = self._gap()
        return last + (self._lines(b"\n") if self._open else b"")

    def _leave_out(self, block: bytes) -> None:
        if not self._left_out:
            block = bytes(self._open) + block
            self._open.clear()
        self._left_out += len(block)
        self._tail = (self._tail + block)[-TAIL_BYTES:]

    def _gap(self) -> bytes:
        if not self._left_out:
            return b""
        missing, tail = self._left_out - len(self._tail), self._tail
        self._left_out, self._tail = 0, b""
        note = (
            f"hlatctl left out {missing} bytes: this rank prints more than the log takes\n".encode() if missing else b""
        )
        return self._lines(note + tail)

    def _lines(self, block: bytes) -> bytes:
        self._open += block
        end = self._open.rfind(b"\n") + 1
        if end == 0 and len(self._open) > TAIL_BYTES:
            self._open += b"\n"
            end = len(self._open)
        if end == 0:
            return b""
        whole = bytes(self._open[: end - 1])
        del self._open[:end]
        return self._prefix + whole.replace(b"\n", b"\n" + self._prefix) + b"\n"


class NodeLog:
    """Collects the output of a node's ranks.

    Args:
        folder: private folder for the socket.
        log: descriptor of the log, opened for appending.
    """

    def __init__(self, folder: Path, log: int) -> None:
        self.socket = folder / "log"
        self._log, self._closing = log, False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(self.socket))
        self._listener.listen(1024)
        self._wake, self._woken = os.pipe()
        self._ranks: dict[int, RankLines] = {}
        self._queue: deque[bytes] = deque()
        self._queued_bytes, self._change = 0, threading.Condition()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]

    def start(self) -> None:
        """Start taking the output of ranks."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Write the remaining output, after the ranks have ended."""
        os.close(self._woken)
        for thread in self._threads:
            thread.join(2 * _CLOSE_S)
        self._listener.close()
        os.close(self._wake)

    def _read(self) -> None:
        deadline_s = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while deadline_s is None or (self._ranks and time.monotonic() < deadline_s):
                for key, _ in selector.select(_IDLE_S if deadline_s is None else 0.1):
                    if key.fd == self._wake:
                        selector.unregister(self._wake)
                        deadline_s = time.monotonic() + _CLOSE_S
                    elif key.fd == self._listener.fileno():
                        self._accept(selector)
                    else:
                        self._take(key.fd, selector)
                now_s = time.monotonic()
                for lines in self._ranks.values():
                    self._put(lines.idle(now_s))
        for lines in self._ranks.values():
            self._put(lines.end())
        self._put(None)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError, ValueError):
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(1.0)
                rank, descriptors, *_ = socket.recv_fds(connection, 16, 1)
                if not descriptors:  # the rank was killed after connecting
                    return
                pipe = descriptors[0]
                os.set_blocking(pipe, False)
                with contextlib.suppress(OSError, AttributeError):  # a user's pipes share a limit
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                self._ranks[pipe] = RankLines(int(rank), time.monotonic())
                selector.register(pipe, selectors.EVENT_READ)
                connection.send(b"1")

    def _take(self, pipe: int, selector: selectors.BaseSelector) -> None:
        try:
            block = os.read(pipe, _PIPE_BYTES)
        except BlockingIOError:
            return
        lines = self._ranks[pipe]
        if block:
            room = self._queued_bytes < _QUEUE_BYTES
            self._put(lines.take(block, time.monotonic(), room=room))
            return
        selector.unregister(pipe)
        os.close(pipe)
        del self._ranks[pipe]
        self._put(lines.end())

    def _put(self, text: bytes | None) -> None:
        """Queue text for the log; None ends the writer."""
        if text == b"":
            return
        with self._change:
            if text is None:
                self._closing = True
            else:
                self._queue.append(text)
                self._queued_bytes += len(text)
            self._change.notify()

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                text = memoryview(self._queue.popleft())
            size = len(text)
            with contextlib.suppress(OSError):  # a full disk: these lines are lost, later ones may fit
                while text:
                    text = text[os.write(self._log, text) :]
            with self._change:
                self._queued_bytes -= size
