"""Fills the headers of an Arrow file in a stand-in, so that ``trainer.data.index`` can index it without its content.

Messages and footer are read as the format defines them (apache/arrow, ``format/Message.fbs`` and ``File.fbs``), as far
as needed: where each message lies, and how long it is. pyarrow can't tell this without reading the content.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainer.data.index import SAMPLED_BYTES, sampled_positions
from trainer.data.read_ahead import spread_requests
from trainer.data.remote import RemoteObject
from trainer.data.stand_in import remote_of, set_time

_MAGIC = b"ARROW1"
#: The file's end: the footer's length and the magic.
_TAIL = struct.Struct("<i6s")
#: Where the stream in an Arrow file begins.
_STREAM_START = 8
_CONTINUATION = b"\xff\xff\xff\xff"
#: Positions of fields in the tables of the format.
_MESSAGE_BODY_LENGTH, _FOOTER_BATCHES = 3, (2, 3)
#: ``Block`` of the footer: offset, length of the header, padding, length of the body.
_BLOCK = struct.Struct("<qi4xq")
#: Read at each end, and for a header of a stream. A header needs some 300 bytes, and 100 more for each column.
_END_BYTES, _WINDOW_BYTES = 64 << 10, 4 << 10
#: A longer header or footer counts as damage.
_MOST_BYTES = 64 << 20


def fill_headers(path: Path) -> None:
    """Fill the headers of an Arrow file or stream, and the blocks that its fingerprint covers.

    Of a damaged file nothing more is filled; indexing then refuses it, or it is fetched and converted, which reports
    the damage. A file takes one request for each batch, many at once; the batches of a stream one after another.

    Raises:
        DataError: the object can't be read.
    """
    remote = remote_of(path)
    assert remote is not None
    with path.open("r+b") as file:
        get = partial(_get, remote, file.fileno())
        head = get((0, min(_END_BYTES, remote.size)))
        with suppress(struct.error, ValueError):
            if head.startswith(_MAGIC):
                ranges = _blocks(remote.size, _footer(remote.size, get))
                for _ in spread_requests(get, ranges):
                    pass
            else:
                _walk(remote.size, head, get)
        for position in sampled_positions(remote.size):
            get((position, min(SAMPLED_BYTES, remote.size - position)))
    set_time(path, remote)


def _get(remote: RemoteObject, descriptor: int, extent: tuple[int, int]) -> bytes:
    """Read (start, size) of the object; write it to the stand-in's file."""
    start, size = extent
    if not 0 <= size <= _MOST_BYTES or not 0 <= start <= remote.size - size:
        raise ValueError("a damaged length")
    content = remote.read(start, size)
    os.pwrite(descriptor, content, start)
    return content


def _footer(size: int, get: partial[bytes]) -> bytes:
    end = get((max(0, size - _END_BYTES), min(_END_BYTES, size)))
    length, magic = _TAIL.unpack(end[-_TAIL.size :])
    if magic != _MAGIC or length <= 0:
        raise ValueError("no footer")
    if length + _TAIL.size > len(end):
        end = get((size - _TAIL.size - length, length + _TAIL.size))
    return end[-_TAIL.size - length : -_TAIL.size]


def _blocks(size: int, footer: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the headers of all dictionaries and batches lie: (start, size)."""
    for field in _FOOTER_BATCHES:
        place = _field(footer, field)
        if not place:
            continue
        first = place + _unsigned(footer, place)
        for number in range(_unsigned(footer, first)):
            start, length, _ = _BLOCK.unpack_from(footer, first + 4 + number * _BLOCK.size)
            yield start, min(length, size - start)


def _walk(size: int, window: bytes, get: partial[bytes]) -> None:
    """Fill the headers of a stream from its beginning, each of which says where the next one is."""
    position = begin = 0
    while position < size:
        if position + 8 > begin + len(window):
            window, begin = get((position, min(_WINDOW_BYTES, size - position))), position
        prefix = 8 if window[position - begin :].startswith(_CONTINUATION) else 4
        (length,) = struct.unpack_from("<i", window, position - begin + prefix - 4)
        if length <= 0:  # the end of the stream
            return
        if position + prefix + length > begin + len(window):
            window, begin = get((position, prefix + length)), position
        place = position - begin + prefix
        message = window[place : place + length]
        body = _field(message, _MESSAGE_BODY_LENGTH)
        (body_length,) = struct.unpack_from("<q", message, body) if body else (0,)
        if body_length < 0:
            raise ValueError("a damaged length")
        position += prefix + length + body_length


def _field(table: bytes, number: int) -> int:
    """Return the position of a field of the FlatBuffer's root table; 0 if it has its default."""
    root = _unsigned(table, 0)
    fields = root - struct.unpack_from("<i", table, root)[0]
    entry = 4 + 2 * number
    if fields < 0 or entry >= struct.unpack_from("<H", table, fields)[0]:
        return 0
    (offset,) = struct.unpack_from("<H", table, fields + entry)
    return root + offset if offset else 0


def _unsigned(table: bytes, position: int) -> int:
    return int(struct.unpack_from("<I", table, position)[0])
