"""Formats quantities (token counts, bytes, durations, times) and texts for a terminal."""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

#: Hosts that a line names.
_NAMED = 8
_COUNT_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
#: Longer values of the configuration are cut.
_LONGEST_VALUE = 60
#: Everything except ASCII text, newlines and tabs.
_UNUSUAL = re.compile(r"[^\n\t -~]+")
_BYTE_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def count(value: float) -> str:
    """Return a count with three or four digits: ``2.5M``, ``833K``, ``200B``."""
    for size, unit in _COUNT_UNITS:
        if value >= size:
            return f"{_short(value / size)}{unit}"
    return f"{value:.0f}"


def counted(number: int, thing: str, things: str = "") -> str:
    """Return a number of things: ``1 trial``, ``20 trials``. ``things`` is a plural that does not only add an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def size(value_bytes: float) -> str:
    """Return bytes in binary units: ``31.6 MiB``."""
    for unit_bytes, unit in _BYTE_UNITS:
        if value_bytes >= unit_bytes:
            return f"{_short(value_bytes / unit_bytes)} {unit}"
    return f"{value_bytes:.0f} bytes"


def duration(value_s: float) -> str:
    """Return a duration: ``4.2 s``, ``3 min 20 s``, ``5 h 10 min`` or ``2 d 3 h``."""
    if value_s < 59.5:
        return f"{value_s:.1f} s" if value_s < 9.95 else f"{value_s:.0f} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def seconds(value_s: float) -> str:
    """Return a time of at most minutes: ``27.5 ms`` or ``3.56 s``."""
    return f"{value_s * 1e3:.3g} ms" if value_s < 1 else f"{value_s:.2f} s"


def utc(time_unix_s: float) -> str:
    """Return a point in time: ``2026-11-21 10:15:00 UTC``."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_unix_s))


def queued(reason: str, expected_start_unix_s: float | None) -> str:
    """Return a job's place in a queue: ``queued (Resources), expected to start at 2026-11-21 10:15:00 UTC``."""
    why = f" ({reason})" if reason else ""
    expected = f", expected to start at {utc(expected_start_unix_s)}" if expected_start_unix_s else ""
    return f"queued{why}{expected}"


def host_names(hosts: Sequence[str]) -> str:
    """Return the names of hosts as text, shortened if there are many."""
    if len(hosts) <= _NAMED:
        return ", ".join(hosts) or "unknown nodes"
    return f"{', '.join(hosts[:_NAMED])} and {len(hosts) - _NAMED:,} more"


def tags_text(tags: Mapping[str, str]) -> str:
    """Return tags as they are typed: ``model=small data=v2``."""
    return " ".join(f"{key}={value}" if value else key for key, value in sorted(tags.items()))


def number(values: Mapping[str, Any], name: str) -> float:
    """Return a number of an event or a score. NaN if it is missing or not a number."""
    try:
        return float(values.get(name, "nan"))
    except (TypeError, ValueError):
        return float("nan")


def value_text(value: Any) -> str:
    """Return a value of the configuration as short text."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def bounded(value: Mapping[str, Any], digits: int = 4) -> str:
    """Return a value with its bounds, if there are any: ``3.2104 (3.1850 to 3.2420)``."""
    low, high = value.get("low"), value.get("high")
    bounds = f" ({low:.{digits}f} to {high:.{digits}f})" if low is not None and high is not None else ""
    return f"{number(value, 'value'):.{digits}f}{bounds}"


def one_line(text: str) -> str:
    """Return a text as one line that a terminal takes no command from: control characters are shown by their codes."""
    if text.isprintable():
        return text
    return "".join(map(_visible, " ".join(text.splitlines())))


def printable(text: str) -> str:
    """Return a text with its newlines and tabs; other control characters are shown by their codes.

    These include the characters that change the direction of writing.
    """
    return _UNUSUAL.sub(lambda found: "".join(map(_visible, found[0])), text)


def _visible(char: str) -> str:
    is_harmless = char.isprintable() or unicodedata.category(char) == "Zs"  # spaces, as in Japanese text
    return char if is_harmless else char.encode("unicode_escape").decode()


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value < 10 else f"{value:.1f}".rstrip("0").rstrip(".")
