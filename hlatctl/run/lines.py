"""The lines of a journal: each is one event as JSON, and ends with its own CRC-32."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from json.scanner import make_scanner
from pathlib import Path
from typing import Any

from hlatctl.run.events import AFTER, is_event
from hlatctl.run.reading import parse_json

Event = dict[str, Any]

VERSION = 1
#: A line ends with ``,"crc":"01234567"}``. The checksum detects values that changed on the disk.
_CRC = b',"crc":"'
_CRC_BYTES = len(b',"crc":"01234567"\n')
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
#: The largest whole number that ``parse_json`` accepts too.
_MAX_INT = 2**64
_INFINITY = float("inf")
#: Limit of a line; a longer one counts as damaged. The largest that a run writes lists a few thousand nodes or scores.
MAX_BYTES = 4 << 20
#: Bytes of a file that are read at once, from its end, to find its last event.
_END_BYTES = 1 << 16


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
#: Without functions for numbers, the decoder is three times faster than that of ``parse_json``.
_SCAN: Callable[[str, int], tuple[Any, int]] = make_scanner(_DECODER)  # type: ignore[arg-type]


def to_line(event: Event) -> bytes:
    """Return an event's line, with its checksum and the end of line."""
    line = _ENCODER.encode(event).encode()
    if len(line) > MAX_BYTES - _CRC_BYTES:
        raise ValueError(f"the {event['kind']} event has {len(line):,} bytes, readers ignore more than {MAX_BYTES:,}")
    return b'%b,"crc":"%08x"}\n' % (line[:-1], zlib.crc32(line))


def parse(line: bytes) -> Event | None:
    """Return the event of a line, without its checksum. None if it is damaged."""
    if line[-18:-10] == _CRC:
        before = line[:-18] + b"}"
        if line[-10:-2] != b"%08x" % zlib.crc32(before):
            return None
        line = before
    try:
        event = _decode(line)
    except (ValueError, RecursionError):
        return None
    return event if is_event(event) else None


def _decode(line: bytes) -> Any:
    """Parse JSON with the limits of ``parse_json``: the same numbers, and the same depth."""
    text = line.decode()
    try:
        event, end = _SCAN(text, 0)
    except StopIteration:
        return parse_json(text)
    if end != len(text) or type(event) is not dict:
        return parse_json(text)
    for item in event.values():
        kind = type(item)
        if kind is float:
            if not -_INFINITY < item < _INFINITY:
                return parse_json(text)
        elif (kind is int and not -_MAX_INT <= item <= _MAX_INT) or kind is dict or kind is list:
            return parse_json(text)
    return event


def clock_unix_s(event: Event) -> float:
    """Return the time that orders an event: its own, or a later one if a clock was set back."""
    time_unix_s: float = event["time_unix_s"]
    return max(time_unix_s, event[AFTER]) if AFTER in event else time_unix_s


def last_event(path: Path) -> Event | None:
    """Return the last event of a file that is not damaged. The cost doesn't grow with the file."""
    with path.open("rb") as file:
        start = file.seek(0, 2)
        begun = b""  # the beginning of the line that the next block ends in; of a long one, more bytes than allowed
        while start:
            end, start = start, max(0, start - _END_BYTES)
            file.seek(start)
            *found, last = file.read(end - start).split(b"\n")
            found.append((last + begun)[: MAX_BYTES + 1])
            for line in reversed(found[1 if start else 0 :]):
                if line and len(line) <= MAX_BYTES and (event := parse(line)):
                    return event
            begun = found[0]
        return None


def ignored(count: int, writer: str, before: Event, beside: Event) -> Event:
    """Return the warning that stands in the place of damaged lines.

    Args:
        count: number of damaged lines.
        writer: of the file.
        before: the event before them; its ``seq`` is 0 if there is none.
        beside: the event whose time and number the warning gets.
    """
    where = f"after event {before['seq']}" if before["seq"] else "at its beginning"
    lines = "1 damaged line is ignored" if count == 1 else f"{count} damaged lines are ignored"
    return warning(f"journal/{writer}.jsonl: {lines}, {where}", writer, beside)


def warning(message: str, writer: str, beside: Event) -> Event:
    """Return a ``warning`` event that is in no file, with the time and the number of another event."""
    return {
        "v": VERSION,
        "seq": beside["seq"],
        "time_unix_s": beside["time_unix_s"],
        "attempt": 0,
        "kind": "warning",
        "message": message,
        "writer": writer,
    }
