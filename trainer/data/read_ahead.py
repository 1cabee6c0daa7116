"""Reads documents of object storage before they are needed, so that the latency of a request doesn't limit a reader.

Requests run in daemon threads of the process, :data:`IN_FLIGHT` at most. They hold up neither its end nor each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from hlatctl.run.errors import DataError

Document = TypeVar("Document", covariant=True)
_T = TypeVar("_T")
#: Requests of a process at once. At 100 ms each, 64 give 640 a second.
IN_FLIGHT = 64
#: Documents that a process reads ahead, at most, but one for each row and source. A row begins with a few, and reads
#: twice as many ahead each time it had to wait: rows of long documents keep few of them in memory.
_MOST_AHEAD, _FIRST_AHEAD = 512, 4


class RemoteDocuments(Protocol[Document]):
    """Documents by position, some of which may need requests."""

    @property
    def is_remote(self) -> bool:
        """Whether reading a document needs requests."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Document: ...


class ReadAhead:
    """Documents that rows read in an order that is known in advance.

    Args:
        documents: of the source.
        readers: how many rows and sources share the process.
    """

    def __init__(self, documents: RemoteDocuments[Any], readers: int) -> None:
        self._documents = documents
        self._most = max(1, _MOST_AHEAD // readers)
        self._waiting: dict[int, deque[Future[Any]]] = {}
        self._depth: dict[int, int] = {}
        self._lock, self._closed = threading.Lock(), False

    def read(self, row: int, nth: int, position_of: Callable[[int], int]) -> Any:
        """Return a row's ``nth`` document, and request those that follow. A row reads them in order.

        Args:
            row: that reads.
            nth: number of the document in the row's order.
            position_of: the position of each number's document.
        """
        waiting = self._waiting.setdefault(row, deque())
        depth = self._depth.setdefault(row, min(_FIRST_AHEAD, self._most))
        with self._lock:
            if self._closed:
                raise DataError("the reader of documents is closed")
            while len(waiting) <= depth:
                waiting.append(submit(partial(self._documents.__getitem__, position_of(nth + len(waiting)))))
            future = waiting[0]
        if not future.done():
            self._depth[row] = min(2 * depth, self._most)
        try:
            return future.result()
        except CancelledError:
            raise DataError("the reader of documents is closed") from None
        finally:
            waiting.popleft()

    def close(self) -> None:
        """End all waiting, also of a thread that waits for a document now."""
        with self._lock:
            self._closed = True
            for future in (future for waiting in self._waiting.values() for future in waiting):
                with suppress(InvalidStateError):  # it is read
                    future.set_exception(CancelledError())


def in_order(documents: RemoteDocuments[Document], positions: Iterable[int]) -> Iterator[Document]:
    """Yield documents at some positions, and read those in object storage ahead."""
    if not documents.is_remote:
        yield from (documents[position] for position in positions)
        return
    yield from spread_requests(documents.__getitem__, positions)


def spread_requests(work: Callable[[Any], _T], tasks: Iterable[Any]) -> Iterator[_T]:
    """Yield the result of each task in order, with all threads at work."""
    waiting: deque[Future[_T]] = deque()
    for task in tasks:
        waiting.append(submit(partial(work, task)))
        if len(waiting) > 2 * IN_FLIGHT:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class _Pool:
    """Daemon threads, unlike those of ``concurrent.futures``, which a process waits for when it ends."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._threads: Sequence[threading.Thread] = ()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        with self._lock:
            if not self._threads:
                self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(IN_FLIGHT)]
                for thread in self._threads:
                    thread.start()
        future: Future[_T] = Future()
        self._queue.put((future, work))
        return future

    def _work(self) -> None:
        while True:
            future, work = self._queue.get()
            if future.done():  # its reader is closed
                continue
            with suppress(InvalidStateError):  # the same, meanwhile
                try:
                    future.set_result(work())
                except BaseException as error:  # raised where the document is needed
                    future.set_exception(error)


_pool = _Pool()


def submit(work: Callable[[], _T]) -> Future[_T]:
    """Call ``work`` in one of the process's threads for requests."""
    return _pool.submit(work)
