"""Standard streams that are closed, full, or have lost their reader.

Failing to write results is an error, because the reader would take partial output for all of it. Messages that can't be
written are dropped: a run must not end because nobody reads its messages.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

#: A shell's exit code of a program that writes to a reader that has ended (`hlatctl runs | head -1`): 128 + SIGPIPE.
READER_ENDED = 141


def prepare() -> None:
    """Make the standard streams of this process usable, whatever they are connected to.

    Closed streams are connected to /dev/null first. Otherwise the next opened file would get such a stream's number,
    and every child process that prints would write to it.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):  # writing to stdout fails as if closed
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)  # a new file takes the lowest free number, this one
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _text(_Results(1, "w", closefd=False), sys.stdout, errors="strict")
    sys.stderr = _text(_Messages(2, "w", closefd=False), sys.stderr, errors="backslashreplace")


def _text(raw: io.FileIO, before: Any, *, errors: str) -> io.TextIOWrapper:
    """Return a stream like Python's standard streams, which are None if they were closed."""
    encoding, errors = (before.encoding, before.errors) if before else ("utf-8", errors)
    is_message = raw.fileno() == 2
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=is_message or raw.isatty()
    )


class _Results(io.FileIO):
    """Stdout. After its first error it drops everything, so that the last flush doesn't fail again."""

    _failed = False

    def write(self, data: Any) -> int:
        if self._failed:
            return len(data)
        try:
            return super().write(data)
        except BrokenPipeError:
            self._failed = True
            raise SystemExit(READER_ENDED) from None
        except OSError as error:
            from hlatctl.run.errors import cannot_write, hint_of

            self._failed = True
            hint = hint_of(error) or "redirect stdout to a file, a pipe or a terminal"
            raise cannot_write("stdout", error, hint=hint) from None


class _Messages(io.FileIO):
    """Stderr."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)
