"""Small blocks of objects that a process keeps in memory: where texts lie, but not the texts."""

from __future__ import annotations

import threading
from collections import OrderedDict

from trainer.data.remote import RemoteObject

#: A block has the offsets of 1,000 to 2,000 texts. All blocks of a process take 64 MiB, which suffices for 10 million
#: documents or more. With larger corpora, more and more documents take two requests instead of one.
_BLOCK_BYTES, _MOST_BLOCKS = 8 << 10, 8 << 10


class Blocks:
    """The most recently used blocks; threads may share it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[RemoteObject, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, remote: RemoteObject, position: int, size: int) -> bytes:
        """Return bytes of an object.

        Raises:
            DataError: as :meth:`RemoteObject.read`.
        """
        first, last = position // _BLOCK_BYTES, (position + size - 1) // _BLOCK_BYTES
        whole = b"".join(self._block(remote, number) for number in range(first, last + 1))
        start = position - first * _BLOCK_BYTES
        if len(whole) < start + size:
            return remote.read(position, size)  # raises: it is outside of the object
        return whole[start : start + size]

    def _block(self, remote: RemoteObject, number: int) -> bytes:
        key = (remote, number)
        with self._lock:
            content = self._kept.get(key)
            if content is not None:
                self._kept.move_to_end(key)
                return content
        start = number * _BLOCK_BYTES
        content = remote.read(start, max(0, min(_BLOCK_BYTES, remote.size - start)))
        with self._lock:
            self._kept[key] = content
            if len(self._kept) > _MOST_BLOCKS:
                self._kept.popitem(last=False)
        return content


BLOCKS = Blocks()
