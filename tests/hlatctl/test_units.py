"""Quantities as text."""

from __future__ import annotations

import pytest

from hlatctl.units import count, duration, one_line, size, utc


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1K"),
        (833_333, "833.3K"),
        (2_506_752, "2.51M"),
        (200e9, "200B"),
        (1.8e12, "1.8T"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (34_813_440, "33.2 MiB")])
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0, "0.0 s"),
        (4.21, "4.2 s"),
        (9.97, "10 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (18_600, "5 h 10 min"),
        (183_600, "2 d 3 h"),
    ],
)
def test_durations(value_s: float, text: str) -> None:
    assert duration(value_s) == text


def test_times_are_utc() -> None:
    assert utc(1_700_000_000) == "2023-11-14 22:13:20 UTC"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Größe: 3 µs", "Größe: 3 µs"),
        ("first\nsecond\r\n", "first second"),
        ("\x1b]0;title\x07 \x9b2J\t\udcff", "\\x1b]0;title\\x07 \\x9b2J\\t\\udcff"),
    ],
)
def test_a_line_takes_no_command_to_the_terminal(text: str, shown: str) -> None:
    assert one_line(text) == shown
